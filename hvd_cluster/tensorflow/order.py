"""The order of the collectives of a ``tf.function``: that of the program, whatever else its calls and branches touch.

TensorFlow itself runs operations with side effects one after the other, but not calls, conditions and loops that use a
variable: two of them that only read it run beside each other. The collectives in them would meet those of another rank
in any order, and a function that is called twice has one name for both. So each operation that holds a collective gets
an edge from the one before it. The edges come on top of TensorFlow's own, and cost nothing when the graph runs.

The gradient of a function, where it is taken of its result eagerly, is a graph in which TensorFlow orders nothing at
all. There the order is that in which the gradients were asked for, which is the same on all ranks too.
"""

from __future__ import annotations

import bisect
import functools
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import auto_control_deps, ops

#: The attributes that name the functions in an operation, of each kind of operation with functions that may block.
_FUNCTIONS = {
    "StatefulPartitionedCall": ("f",),
    "If": ("then_branch", "else_branch"),
    "Case": ("branches",),
    "While": ("cond", "body"),
}
#: The attribute of a graph that lists its operations that hold a collective, in the order of the program.
_COLLECTIVES = "_hvd_collectives"


def put_in_order(operation: Any) -> None:
    """Run ``operation``, which holds a collective, behind those before it in its graph and ahead of those after it."""
    _watch()
    _insert(operation)


@functools.cache
def _watch() -> None:
    """Have TensorFlow show us the operations of each graph that it has traced, when it orders them itself."""
    auto_control_deps.register_acd_resource_resolver(_order_what_calls_collectives)


def _order_what_calls_collectives(operation: Any, resource_reads: Any, resource_writes: Any) -> bool:
    del resource_reads, resource_writes
    if _calls_collectives(operation) and _insert(operation):
        _order_gradient(operation)
    return False  # no other resources than TensorFlow has found


def _calls_collectives(operation: Any) -> bool:
    for attribute in _FUNCTIONS.get(operation.type, ()):
        functions = operation.get_attr(attribute)
        for function in functions if isinstance(functions, list) else [functions]:
            definition = operation.graph._get_function(function.name)
            # A function that was loaded from a file has no graph yet, and no collective of this process.
            if getattr(getattr(definition, "_cached_graph", None), _COLLECTIVES, None):
                return True
    return False


def _insert(operation: Any) -> bool:
    """Add the edges of ``operation``; False if it has them, or is part of the control flow of TensorFlow 1."""
    graph = operation.graph
    if not hasattr(graph, _COLLECTIVES):
        setattr(graph, _COLLECTIVES, [])
    collectives = getattr(graph, _COLLECTIVES)
    place = bisect.bisect_left(collectives, operation._id, key=lambda each: each._id)
    is_in_order = place < len(collectives) and collectives[place] is operation
    if is_in_order or operation._control_flow_context is not None:
        return False
    if place > 0:
        operation._add_control_input(collectives[place - 1])
    if place < len(collectives):
        collectives[place]._add_control_input(operation)
    collectives.insert(place, operation)
    return True


def _order_gradient(operation: Any) -> None:
    """Order what the gradient of ``operation`` will be made of."""
    try:
        gradient = ops.get_gradient_function(operation)
    except LookupError:
        gradient = None
    if gradient is None:
        return

    def ordered(operation: Any, *slopes: Any) -> Any:
        graph = tf.compat.v1.get_default_graph()
        num_before = len(graph.get_operations())
        results = gradient(operation, *slopes)
        for each in graph.get_operations()[num_before:]:
            _order_what_calls_collectives(each, None, None)
        return results

    operation._gradient_function = ordered
