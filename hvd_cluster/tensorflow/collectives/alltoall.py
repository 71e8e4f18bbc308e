"""Alltoall: every rank sends a slice of its tensor to each rank."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
import torch

from hvd_cluster.engine.membership import rows_by_rank
from hvd_cluster.engine.none_arguments import none_is_default
from hvd_cluster.engine.process_sets import ProcessSet, global_process_set
from hvd_cluster.engine.request import Handle
from hvd_cluster.engine.signature import Kind
from hvd_cluster.engine.submission import Collective
from hvd_cluster.tensorflow.custom_gradient import custom_gradient
from hvd_cluster.tensorflow.interop import any_rows, call, dense
from hvd_cluster.tensorflow.naming import gradient_label, label


@none_is_default
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send a slice of the rows to each rank.

    Args:
        tensor: shape (rows, ...); ``rows`` may differ between ranks; the other dimensions are the same on all ranks.
        splits: int32 of shape (ranks,): the number of rows to send to each rank. By default the rows are split equally.
        name: matches the call with those of the other ranks.
        ignore_name_scope: do not prepend the graph's name scope to the name.
        process_set: the ranks that take part.

    Returns:
        A tensor of shape (received rows, ...), in the order of the ranks; with ``splits``, a pair of this tensor and
        the number of rows from each rank, int32 of shape (ranks,). The gradient of a row returns to the rank that sent
        it.

    Raises:
        tf.errors.InvalidArgumentError: the tensor has an unsupported dtype, or ``splits`` does not match it.
        tf.errors.FailedPreconditionError: the ranks disagree, or the tensor has no dimension (UnknownError with the
            same text in a graph).
        tf.errors.UnknownError: the job has ended.
    """
    value = dense(tensor)
    collective = Collective(
        kind=Kind.ALLTOALL, process_set=process_set, name=label(name, value, ignore_name_scope=ignore_name_scope)
    )
    rows_for = None if splits is None else tf.convert_to_tensor(splits)
    if splits is not None and not tf.is_tensor(splits):
        rows_for = tf.cast(rows_for, tf.int32)

    def begin(tensors: list[torch.Tensor], is_waited_for: bool) -> Handle:
        tensor, *given = tensors
        return collective.begin([tensor], is_waited_for, splits=rows_by_rank(tensor, given, process_set))

    @custom_gradient
    def differentiable(sent: tf.Tensor) -> Any:
        inputs = [sent] if rows_for is None else [sent, rows_for]
        shapes = [any_rows(sent.shape), tf.TensorShape([None])]
        output, received = call(begin, inputs, [sent.dtype, tf.int32], shapes)

        def gradient(upstream: tf.Tensor, _: tf.Tensor = None) -> tf.Tensor:
            request_name = gradient_label(collective.name)
            back, _ = alltoall(upstream, received, request_name, ignore_name_scope=True, process_set=process_set)
            # Rows after the last split were not sent.
            unsent = tf.shape(sent)[0] - tf.shape(back)[0]
            padding = tf.concat([[[0, unsent]], tf.zeros([tf.rank(back) - 1, 2], tf.int32)], axis=0)
            return tf.ensure_shape(tf.pad(back, padding), sent.shape)

        return (output, received), gradient

    output, received = differentiable(value)
    return output if splits is None else (output, received)
