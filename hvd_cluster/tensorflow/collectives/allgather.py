"""Allgather of one tensor or of a group.

Every rank gets all ranks' tensors, concatenated along the first dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvd_cluster.engine.none_arguments import none_is_default
from hvd_cluster.engine.process_sets import ProcessSet, global_process_set
from hvd_cluster.engine.signature import Kind, ReduceOp
from hvd_cluster.engine.submission import Collective
from hvd_cluster.tensorflow.custom_gradient import custom_gradient
from hvd_cluster.tensorflow.interop import any_rows, call, dense
from hvd_cluster.tensorflow.naming import gradient_label, label
from hvd_cluster.tensorflow.rank_ops import index_op


@none_is_default
def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Concatenate the tensors of all ranks along the first dimension.

    Args:
        tensor: shape (rows, ...); ``rows`` may be 0 and may differ between ranks; the other dimensions are the same on
            all ranks.
        name: matches the call with those of the other ranks.
        ignore_name_scope: do not prepend the graph's name scope to the name.
        process_set: the ranks that take part.

    Returns:
        A tensor of shape (sum of rows, ...), in the order of the ranks. Its gradient is this rank's slice of the
        averaged gradients, as in Horovod.

    Raises:
        tf.errors.InvalidArgumentError: the tensor has an unsupported dtype.
        tf.errors.FailedPreconditionError: the ranks disagree, or the tensor has no dimension (UnknownError with the
            same text in a graph).
        tf.errors.UnknownError: the job has ended.
    """
    (result,) = grouped_allgather([tensor], name, ignore_name_scope, process_set)
    return result


@none_is_default
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
    request_name = label(name, values[0], ignore_name_scope=ignore_name_scope)
    return gathered(values, Collective(kind=Kind.ALLGATHER, process_set=process_set, name=request_name))


def gathered(tensors: Sequence[tf.Tensor], collective: Collective, *, ends_step: bool = False) -> list[tf.Tensor]:
    """Allgather of dense tensors; differentiable."""
    process_set = collective.process_set

    @custom_gradient
    def differentiable(*values: tf.Tensor) -> Any:
        def gradient(*upstream: tf.Tensor) -> list[tf.Tensor | None]:
            results: list[tf.Tensor | None] = [None] * len(values)
            real = [i for i, value in enumerate(values) if value.dtype.is_floating]
            if not real:
                return results
            # One request for float32 and float64 tensors; each keeps its dtype.
            name = gradient_label(collective.name)
            average = Collective(kind=Kind.ALLREDUCE, process_set=process_set, name=name, op=ReduceOp.AVERAGE)
            gradients = [upstream[i] for i in real]
            averages = call(average.begin, gradients, [t.dtype for t in gradients], [t.shape for t in gradients])
            mine = tf.stack([tf.shape(values[i])[0] for i in real])  # (tensors,)
            row_label = None if name is None else f"{name}.rows"
            rows = allgather(mine[None], row_label, ignore_name_scope=True, process_set=process_set)  # (ranks, tensors)
            before = tf.reduce_sum(rows[: index_op(process_set)], axis=0)
            for place, (i, each) in enumerate(zip(real, averages, strict=True)):
                results[i] = each[before[place] : before[place] + mine[place]]
            return results

        shapes = [any_rows(value.shape) for value in values]
        return call(collective.begin, values, [t.dtype for t in values], shapes, ends_step=ends_step), gradient

    return list(differentiable(*tensors))
