"""Runs the collectives of a ``tf.function`` in the order of the program.

TensorFlow runs operations with side effects one after the other, but not calls, conditions and loops that use a
variable: two of them that only read it run concurrently. Their collectives would match those of another rank in any
order, and a function that is called twice has one name for both calls. So each operation that contains a collective
gets an edge from the previous one. These edges are in addition to TensorFlow's own, and are free at run time.

If the gradient of a function is taken eagerly, TensorFlow does not order its graph. There the order is that in which
the gradients were requested, which is also equal on all ranks.
"""

from __future__ import annotations

import bisect
import functools
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import auto_control_deps, ops

#: For each kind of operation that calls functions, the attributes that name them.
_FUNCTIONS = {
    "StatefulPartitionedCall": ("f",),
    "If": ("then_branch", "else_branch"),
    "Case": ("branches",),
    "While": ("cond", "body"),
}
#: The attribute of a graph that lists its operations with collectives, in the order of the program.
_COLLECTIVES = "_hvd_collectives"


def put_in_order(operation: Any) -> None:
    """Order ``operation``, which contains a collective, among those of its graph."""
    _watch()
    _insert(operation)


@functools.cache
def _watch() -> None:
    """Have TensorFlow report the operations of each traced graph when it orders them."""
    auto_control_deps.register_acd_resource_resolver(_order_what_calls_collectives)


def _order_what_calls_collectives(operation: Any, resource_reads: Any, resource_writes: Any) -> bool:
    del resource_reads, resource_writes
    if _calls_collectives(operation) and _insert(operation):
        _order_gradient(operation)
    return False  # adds no resources to those that TensorFlow found


def _calls_collectives(operation: Any) -> bool:
    for attribute in _FUNCTIONS.get(operation.type, ()):
        functions = operation.get_attr(attribute)
        for function in functions if isinstance(functions, list) else [functions]:
            definition = operation.graph._get_function(function.name)
            # A function that was loaded from a file has no graph yet, and contains no collective of this process.
            if getattr(getattr(definition, "_cached_graph", None), _COLLECTIVES, None):
                return True
    return False


def _insert(operation: Any) -> bool:
    """Add the edges of ``operation``; return whether any were added.

    None are if it has them already, or belongs to TensorFlow 1 control flow.
    """
    graph = operation.graph
    if not hasattr(graph, _COLLECTIVES):
        setattr(graph, _COLLECTIVES, [])
    collectives = getattr(graph, _COLLECTIVES)
    position = bisect.bisect_left(collectives, operation._id, key=lambda each: each._id)
    is_in_order = position < len(collectives) and collectives[position] is operation
    if is_in_order or operation._control_flow_context is not None:
        return False
    if position > 0:
        operation._add_control_input(collectives[position - 1])
    if position < len(collectives):
        collectives[position]._add_control_input(operation)
    collectives.insert(position, operation)
    return True


def _order_gradient(operation: Any) -> None:
    """Order the operations of the gradient of ``operation``."""
    try:
        gradient = ops.get_gradient_function(operation)
    except LookupError:
        gradient = None
    if gradient is None:
        return

    def ordered(operation: Any, *gradients: Any) -> Any:
        graph = tf.compat.v1.get_default_graph()
        num_before = len(graph.get_operations())
        results = gradient(operation, *gradients)
        for each in graph.get_operations()[num_before:]:
            _order_what_calls_collectives(each, None, None)
        return results

    operation._gradient_function = ordered
