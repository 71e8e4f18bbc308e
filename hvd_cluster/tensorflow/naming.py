"""What an operation is called where it has no name of its own: in a graph after its tensor, equally on all ranks."""

from __future__ import annotations

import re
import weakref
from collections import Counter
from typing import Any

import tensorflow as tf
from tensorflow.python.ops.control_flow_v2_func_graphs import ControlFlowFuncGraph

_used: weakref.WeakKeyDictionary[Any, Counter[str]] = weakref.WeakKeyDictionary()


def label(name: str | None, tensor: Any, *, ignore_name_scope: bool = False) -> str | None:
    """What the ranks match an operation by.

    Args:
        name: what the user has called it.
        tensor: what it begins with.
        ignore_name_scope: leave out the graph's present name scope.

    Returns:
        Eagerly ``name``, and None where there is none: the operations are then matched by their number. In a graph the
        name scope, and ``name`` or that of the tensor, and a number where the same graph has had it before: it does not
        depend on how often the graph was traced. The branches of a condition and the body of a loop are graphs of their
        own, which may run beside each other: the scope of the condition or the loop distinguishes them.
    """
    if tf.executing_eagerly():
        return name
    graph = tf.compat.v1.get_default_graph()
    base = normalized(
        name if name is not None else getattr(tensor, "name", "") if tf.is_symbolic_tensor(tensor) else ""
    )
    return _numbered(graph, [] if ignore_name_scope else _scopes(graph), base)


def unscoped_label(name: str | None) -> str | None:
    """:func:`label` of an operation that this package calls ``name``, whatever Keras calls the layers around it.

    Those names count what a process has built before, which need not be the same on all ranks. What distinguishes
    conditions and loops stays.

    Returns:
        None eagerly, or where ``name`` is None.
    """
    if name is None or tf.executing_eagerly():
        return None
    graph = tf.compat.v1.get_default_graph()
    return _numbered(graph, _conditions(graph), normalized(name))


def gradient_label(name: str | None) -> str | None:
    """What the gradient of the operation ``name`` is matched by."""
    return unscoped_label(None if name is None else f"{name}.gradient")


def _numbered(graph: Any, scopes: list[str], base: str) -> str:
    if scopes:
        base = f"{normalized('/'.join(scopes))}.{base}"
    used = _used.setdefault(graph, Counter())
    used[base] += 1
    return base if used[base] == 1 else f"{base}_{used[base] - 1}"


def _conditions(graph: Any) -> list[str]:
    """The innermost scope around each condition and loop that is open, from the outermost: its own."""
    if not isinstance(graph, ControlFlowFuncGraph):
        return []
    around = graph.outer_graph.get_name_scope().rpartition("/")[2]
    return [*_conditions(graph.outer_graph), *([around] if around else [])]


def _scopes(graph: Any) -> list[str]:
    """The name scopes that are open, from the outermost, as far as the function or the v1 graph that runs as one."""
    around = _scopes(graph.outer_graph) if isinstance(graph, ControlFlowFuncGraph) else []
    here = graph.get_name_scope()
    return [*around, here] if here else around


def normalized(name: str) -> str:
    """``name`` with nothing but letters, digits, dots, dashes and underscores."""
    return re.sub(r"[^A-Za-z0-9_.\-]", "_", name) or "constant"
