"""Gradients of our own for what TensorFlow cannot differentiate."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import ops


def custom_gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    """``tf.custom_gradient`` that keeps no graph alive.

    TensorFlow's registry keeps each gradient as long as the process lives, and that gradient keeps its graph with all
    its constants. Here the operation keeps its gradient, and the registry finds it for as long as the graph lives.

    Args:
        function: of tensors; gives its results, and the function of the results' gradients that gives the arguments'.
    """
    differentiable = tf.custom_gradient(function)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator,unused-ignore]
    def call(*tensors: tf.Tensor) -> Any:
        results = differentiable(*tensors)
        if not tf.executing_eagerly():
            _keep_gradient(tf.nest.flatten(results)[0].op)
        return results

    return call  # type: ignore[no-any-return,unused-ignore]


def _keep_gradient(operation: Any) -> None:
    entry = ops.gradient_registry._registry[operation.get_attr("_gradient_op_type").decode()]
    gradient = operation._gradient_function = entry["type"]
    found = weakref.ref(gradient)

    def of_a_graph_that_lives(operation: Any, *gradients: Any) -> Any:
        its_gradient = found()
        if its_gradient is None:
            raise LookupError("the graph that this operation was copied from is gone, and its gradient with it")
        return its_gradient(operation, *gradients)

    entry["type"] = of_a_graph_that_lives
