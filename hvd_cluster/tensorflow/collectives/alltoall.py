"""Alltoall: every rank sends a slice of its tensor to each rank, and gets the slices meant for it."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
import torch

from hvd_cluster.engine.process_sets import ProcessSet, global_process_set
from hvd_cluster.engine.request import Handle, Kind
from hvd_cluster.errors import HorovodInternalError
from hvd_cluster.tensorflow.collectives.arguments import any_rows, dense
from hvd_cluster.tensorflow.crossing import call
from hvd_cluster.tensorflow.naming import label
from hvd_cluster.tensorflow.submission import Collective, members


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send a slice of the rows to each rank.

    Args:
        tensor: shape (rows, ...); ``rows`` may differ between ranks, the rest is equal on all of them.
        splits: int32 of shape (ranks,): how many rows go to each rank. Without it the rows are split equally.
        name: what the ranks are matched by.
        ignore_name_scope: leave the name scope of the graph out of the name.
        process_set: whose ranks take part.

    Returns:
        A tensor of shape (received rows, ...), in the order of the ranks; with ``splits`` a pair of it and the rows
        that came from each rank, int32 of shape (ranks,). Its gradient goes back the way the rows came.

    Raises:
        tf.errors.InvalidArgumentError: the tensor cannot be sent, or ``splits`` does not describe it.
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
        return collective.begin([tensor], is_waited_for, splits=_checked_splits(tensor, given, process_set))

    @tf.custom_gradient  # type: ignore[untyped-decorator,unused-ignore]
    def differentiable(sent: tf.Tensor) -> Any:
        inputs = [sent] if rows_for is None else [sent, rows_for]
        shapes = [any_rows(sent.shape), tf.TensorShape([None])]
        output, received = call(begin, inputs, [sent.dtype, tf.int32], shapes)

        def gradient(upstream: tf.Tensor, _: tf.Tensor = None) -> tf.Tensor:
            back, _ = alltoall(upstream, received, process_set=process_set)
            # Rows behind the last split were not sent.
            unsent = tf.shape(sent)[0] - tf.shape(back)[0]
            padding = tf.concat([[[0, unsent]], tf.zeros([tf.rank(back) - 1, 2], tf.int32)], axis=0)
            return tf.ensure_shape(tf.pad(back, padding), sent.shape)

        return (output, received), gradient

    output, received = differentiable(value)
    return output if splits is None else (output, received)


def _checked_splits(tensor: torch.Tensor, given: list[torch.Tensor], process_set: ProcessSet) -> tuple[int, ...]:
    """The rows for each rank."""
    num_ranks = len(members(process_set))
    if tensor.dim() == 0:
        raise HorovodInternalError("a rank tried to ALLTOALL a rank-zero tensor.")
    rows = tensor.shape[0]
    if not given:
        if rows % num_ranks:
            raise ValueError(
                f"the first dimension of the tensor, {rows}, cannot be split equally over {num_ranks} ranks"
            )
        return (rows // num_ranks,) * num_ranks
    (splits,) = given
    if splits.dim() != 1 or splits.dtype != torch.int32:
        raise ValueError(f"splits must be a 1-D int32 tensor, not {splits.dtype} of shape {tuple(splits.shape)}")
    counts = tuple(int(count) for count in splits.tolist())
    if len(counts) != num_ranks or min(counts) < 0:
        raise ValueError(f"splits must hold the rows for each of the {num_ranks} ranks, and holds {counts}")
    if sum(counts) > rows:
        raise ValueError(f"splits send {sum(counts)} rows, but the tensor has {rows}")
    return counts
