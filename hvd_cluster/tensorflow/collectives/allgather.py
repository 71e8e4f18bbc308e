"""Allgather of one tensor or of a group: every rank gets all ranks' tensors, one below the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvd_cluster.engine.process_sets import ProcessSet, global_process_set
from hvd_cluster.engine.request import Kind, ReduceOp
from hvd_cluster.engine.submission import Collective
from hvd_cluster.tensorflow.collectives.arguments import any_rows, dense
from hvd_cluster.tensorflow.crossing import call
from hvd_cluster.tensorflow.naming import label
from hvd_cluster.tensorflow.questions import index_op


def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Concatenate the tensors of all ranks along the first dimension.

    Args:
        tensor: shape (rows, ...); ``rows`` may differ between ranks and be 0, the rest is equal on all of them.
        name: what the ranks are matched by.
        ignore_name_scope: leave the name scope of the graph out of the name.
        process_set: whose ranks take part.

    Returns:
        A tensor of shape (sum of rows, ...), in the order of the ranks. Its gradient is this rank's slice of the
        gradients' average, as in Horovod.

    Raises:
        tf.errors.InvalidArgumentError: the tensor cannot be sent.
        tf.errors.FailedPreconditionError: the ranks disagree, or the tensor has no dimension (UnknownError with the
            same text in a graph).
        tf.errors.UnknownError: the job has ended.
    """
    (result,) = grouped_allgather([tensor], name, ignore_name_scope, process_set)
    return result


def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """:func:`allgather` of several tensors as one request."""
    values = [dense(tensor) for tensor in tensors]
    if not values:
        return []
    its_label = label(name, values[0], ignore_name_scope=ignore_name_scope)
    return gathered(values, Collective(kind=Kind.ALLGATHER, process_set=process_set, name=its_label))


def gathered(tensors: Sequence[tf.Tensor], collective: Collective) -> list[tf.Tensor]:
    """Dense tensors, gathered; differentiable."""
    process_set = collective.process_set

    @tf.custom_gradient  # type: ignore[untyped-decorator,unused-ignore]
    def differentiable(*values: tf.Tensor) -> Any:
        def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
            # float32 and float64 travel in one request; each keeps its type.
            average = Collective(
                kind=Kind.ALLREDUCE, process_set=process_set, name=label(None, upstream[0]), op=ReduceOp.AVERAGE
            )
            averages = call(average.begin, upstream, [t.dtype for t in upstream], [t.shape for t in upstream])
            mine = tf.stack([tf.shape(value)[0] for value in values])  # (tensors,)
            rows = allgather(mine[None], process_set=process_set)  # (ranks, tensors)
            before = tf.reduce_sum(rows[: index_op(process_set)], axis=0)
            return [each[before[i] : before[i] + mine[i]] for i, each in enumerate(averages)]

        return call(collective.begin, values, [t.dtype for t in values], [any_rows(t.shape) for t in values]), gradient

    return list(differentiable(*tensors))
