"""Custom gradients that keep no graph alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import ops


def custom_gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    """``tf.custom_gradient`` that keeps no graph alive.

    TensorFlow's registry holds each gradient function until the process ends, and with it the graph and its constants.
    Here the operation holds its gradient function, and the registry holds only a weak reference.

    Args:
        function: takes tensors; returns its results and the gradient function, as for ``tf.custom_gradient``.
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
    reference = weakref.ref(gradient)

    def look_up(operation: Any, *gradients: Any) -> Any:
        its_gradient = reference()
        if its_gradient is None:
            raise LookupError(
                "the gradient of this operation was deleted with the graph that the operation was copied from"
            )
        return its_gradient(operation, *gradients)

    entry["type"] = look_up
