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
        own, which may run beside each other: the scope of the condition or the loop tells them apart.
    """
    if tf.executing_eagerly():
        return name
    graph = tf.compat.v1.get_default_graph()
    base = normalized(
        name if name is not None else getattr(tensor, "name", "") if tf.is_symbolic_tensor(tensor) else ""
    )
    scope = "/".join(_scopes(graph))
    if scope and not ignore_name_scope:
        base = f"{normalized(scope)}.{base}"
    used = _used.setdefault(graph, Counter())
    used[base] += 1
    return base if used[base] == 1 else f"{base}_{used[base] - 1}"


def _scopes(graph: Any) -> list[str]:
    """The name scopes that are open, from the outermost, as far as the function or the v1 graph that runs as one."""
    around = _scopes(graph.outer_graph) if isinstance(graph, ControlFlowFuncGraph) else []
    here = graph.get_name_scope()
    return [*around, here] if here else around


def normalized(name: str) -> str:
    """``name`` with nothing but letters, digits, dots, dashes and underscores."""
    return re.sub(r"[^A-Za-z0-9_.\-]", "_", name) or "constant"
