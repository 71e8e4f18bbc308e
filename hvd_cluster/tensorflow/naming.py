"""Names of operations, the same on all ranks.

In a graph an unnamed operation is named after its tensor.
"""

from __future__ import annotations

import re
import weakref
from collections import Counter
from typing import Any

import tensorflow as tf
from tensorflow.python.ops.control_flow_v2_func_graphs import ControlFlowFuncGraph

_used: weakref.WeakKeyDictionary[Any, Counter[str]] = weakref.WeakKeyDictionary()


def label(name: str | None, tensor: Any, *, ignore_name_scope: bool = False) -> str | None:
    """The name by which the ranks match an operation.

    Args:
        name: the user's name for it.
        tensor: the operation's first tensor.
        ignore_name_scope: leave out the graph's current name scope.

    Returns:
        In eager mode ``name``; if it is None, the ranks match operations by number. In a graph, the name scope and
        ``name`` or the name of the tensor, with a suffix if the graph already has this name; it does not depend on how
        often the graph was traced. The branches of a condition and the body of a loop are separate graphs that may run
        concurrently: the scope of the condition or loop distinguishes them.
    """
    if tf.executing_eagerly():
        return name
    graph = tf.compat.v1.get_default_graph()
    base = normalized(
        name if name is not None else getattr(tensor, "name", "") if tf.is_symbolic_tensor(tensor) else ""
    )
    return _numbered(graph, [] if ignore_name_scope else _scopes(graph), base)


def unscoped_label(name: str | None) -> str | None:
    """:func:`label` without the scopes of Keras layers.

    For an operation that this package calls ``name``. Keras numbers layers by what the process has built before, which
    may differ between ranks. The scopes of conditions and loops stay.

    Returns:
        None in eager mode, or if ``name`` is None.
    """
    if name is None or tf.executing_eagerly():
        return None
    graph = tf.compat.v1.get_default_graph()
    return _numbered(graph, _conditions(graph), normalized(name))


def gradient_label(name: str | None) -> str | None:
    """The name by which the ranks match the gradient of the operation ``name``."""
    return unscoped_label(None if name is None else f"{name}.gradient")


def _numbered(graph: Any, scopes: list[str], base: str) -> str:
    if scopes:
        base = f"{normalized('/'.join(scopes))}.{base}"
    used = _used.setdefault(graph, Counter())
    used[base] += 1
    return base if used[base] == 1 else f"{base}_{used[base] - 1}"


def _conditions(graph: Any) -> list[str]:
    """The scope of each enclosing condition and loop, outermost first."""
    if not isinstance(graph, ControlFlowFuncGraph):
        return []
    around = graph.outer_graph.get_name_scope().rpartition("/")[2]
    return [*_conditions(graph.outer_graph), *([around] if around else [])]


def _scopes(graph: Any) -> list[str]:
    """The open name scopes of the enclosing function or v1 graph, outermost first."""
    around = _scopes(graph.outer_graph) if isinstance(graph, ControlFlowFuncGraph) else []
    here = graph.get_name_scope()
    return [*around, here] if here else around


def normalized(name: str) -> str:
    """A name with letters, digits, dots, dashes and underscores only.

    All other characters are replaced.
    """
    return re.sub(r"[^A-Za-z0-9_.\-]", "_", name) or "constant"
