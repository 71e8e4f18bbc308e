"""Broadcast: every rank gets the root's tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvd_cluster.engine.none_arguments import none_is_default
from hvd_cluster.engine.process_sets import ProcessSet, global_process_set
from hvd_cluster.engine.signature import Kind, ReduceOp
from hvd_cluster.engine.submission import Collective, check_root
from hvd_cluster.tensorflow.collectives.allreduce import reduced
from hvd_cluster.tensorflow.custom_gradient import custom_gradient
from hvd_cluster.tensorflow.dtypes import check_dtype
from hvd_cluster.tensorflow.errors import InvalidRequestError, as_tensorflow_errors
from hvd_cluster.tensorflow.interop import call, dense, is_v1_graph
from hvd_cluster.tensorflow.naming import gradient_label, label
from hvd_cluster.tensorflow.rank_ops import rank_op


@none_is_default
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Broadcast the root's tensor to all ranks.

    Args:
        tensor: any shape; same shape and dtype on all ranks.
        root_rank: the global rank whose tensor is broadcast; a member of the process set.
        name: matches the call with those of the other ranks.
        ignore_name_scope: do not prepend the graph's name scope to the name.
        process_set: the ranks that take part.

    Returns:
        A new tensor. Its gradient is the averaged gradient on the root, and zero on other ranks.

    Raises:
        tf.errors.InvalidArgumentError: the tensor has an unsupported dtype, or there is no such root.
        tf.errors.FailedPreconditionError: the ranks disagree (UnknownError with the same text in a graph).
        tf.errors.UnknownError: the job has ended.
    """
    value = dense(tensor)
    _check_root(root_rank, process_set)
    collective = Collective(
        kind=Kind.BROADCAST,
        process_set=process_set,
        name=label(name, value, ignore_name_scope=ignore_name_scope),
        root=root_rank,
    )

    @custom_gradient
    def differentiable(tensor: tf.Tensor) -> Any:
        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            request_name = gradient_label(collective.name)
            average = Collective(kind=Kind.ALLREDUCE, process_set=process_set, name=request_name, op=ReduceOp.AVERAGE)
            is_root = tf.cast(tf.equal(rank_op(), root_rank), upstream.dtype)
            return reduced([upstream], average)[0] * is_root

        return call(collective.begin, [tensor], [tensor.dtype], [tensor.shape])[0], gradient

    return differentiable(value)


@none_is_default
def broadcast_(
    variables: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Overwrite variables with the root's values, in place.

    Args:
        variables: a TensorFlow or Keras variable, or a list of them; the same on all ranks.
        root_rank: the global rank whose values are broadcast.
        name: matches the call with those of the other ranks.
        process_set: the ranks that take part.

    Returns:
        The variable or the list of variables; in a v1 graph, the operation that assigns them.

    Raises:
        tf.errors.InvalidArgumentError: one is not a variable or has an unsupported dtype, or there is no such root.
        tf.errors.FailedPreconditionError: the ranks disagree (UnknownError with the same text in a graph).
        tf.errors.UnknownError: the job has ended.
    """
    given = list(variables) if isinstance(variables, (list, tuple)) else [variables]
    _check_root(root_rank, process_set)
    if not given:
        return tf.no_op() if is_v1_graph() else []
    for variable in given:
        _check_variable(variable)
    values = [dense(variable) for variable in given]
    collective = Collective(kind=Kind.BROADCAST, process_set=process_set, name=label(name, values[0]), root=root_rank)
    results = call(collective.begin_parts, values, [v.dtype for v in values], [v.shape for v in values])
    assignments = [variable.assign(result) for variable, result in zip(given, results, strict=True)]
    if is_v1_graph():
        return tf.group(*assignments)
    return given if isinstance(variables, (list, tuple)) else given[0]


@none_is_default
def broadcast_variables(
    variables: Sequence[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> Any:
    """:func:`broadcast_`; ``inplace`` is accepted and has no effect."""
    del inplace
    return broadcast_(list(variables), root_rank, process_set=process_set)


def _check_variable(variable: Any) -> None:
    if not hasattr(variable, "assign"):
        text = f"a list of variables is overwritten in place, but it contains a {type(variable).__name__}"
        raise InvalidRequestError(None, None, f"{text}: pass the variables themselves")
    check_dtype(tf.as_dtype(variable.dtype), variable.name)


def _check_root(root_rank: int, process_set: ProcessSet) -> None:
    with as_tensorflow_errors():
        check_root(root_rank, process_set)
