"""Reducescatter of one tensor or of a group.

Each rank gets some rows of the reduced tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvd_cluster.engine.none_arguments import none_is_default
from hvd_cluster.engine.process_sets import ProcessSet, global_process_set
from hvd_cluster.engine.signature import Kind, ReduceOp
from hvd_cluster.engine.submission import Collective, scatter_op
from hvd_cluster.errors import UnsupportedReductionError
from hvd_cluster.tensorflow.collectives.allgather import gathered
from hvd_cluster.tensorflow.compression import Compression, Compressor
from hvd_cluster.tensorflow.custom_gradient import custom_gradient
from hvd_cluster.tensorflow.interop import any_rows, call, dense
from hvd_cluster.tensorflow.naming import gradient_label, label
from hvd_cluster.tensorflow.rank_ops import num_members_op


@none_is_default
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tf.Tensor:
    """Reduce a tensor over all ranks and keep this rank's rows of the result.

    Args:
        tensor: shape (rows, ...), equal on all ranks. The rows are assigned to the ranks in order and as equally as can
            be; the first ``rows % ranks`` ranks get one more.
        device_dense: accepted and ignored.
        compression: how the tensor is compressed for transfer.
        op: Average or Sum.
        name: matches the call with those of the other ranks.
        process_set: the ranks that take part.
        ignore_name_scope: do not prepend the graph's name scope to the name.
        prescale_factor: multiplies the tensor before the reduction.
        postscale_factor: multiplies the result.

    Returns:
        A new tensor of this rank's rows. Its gradient is the allgather of the gradients, multiplied by the factors
        and, for Sum, by the number of ranks.

    Raises:
        ValueError: ``op`` is neither Average nor Sum.
        tf.errors.InvalidArgumentError: the tensor has an unsupported dtype.
        tf.errors.FailedPreconditionError: the ranks disagree, or the tensor has no dimension (UnknownError with the
            same text in a graph).
        tf.errors.UnknownError: the job has ended.
    """
    del device_dense
    factors = (prescale_factor, postscale_factor)
    (result,) = _grouped([tensor], compression, op, name, process_set, ignore_name_scope, factors)
    return result


@none_is_default
def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
) -> list[tf.Tensor]:
    """:func:`reducescatter` of several tensors as one request."""
    del device_dense
    if not tensors:
        return []
    return _grouped(tensors, compression, op, name, process_set, False, (prescale_factor, postscale_factor))


def _grouped(
    tensors: Sequence[Any],
    compression: type[Compressor],
    op: ReduceOp,
    name: str | None,
    process_set: ProcessSet,
    ignore_name_scope: bool,
    factors: tuple[float, float],
) -> list[tf.Tensor]:
    try:
        op = scatter_op(op)
    except UnsupportedReductionError as error:  # a tf.function would raise a StagingError for a class of ours
        raise ValueError(str(error)) from None
    compressed, contexts = zip(*(compression.compress(dense(tensor)) for tensor in tensors), strict=True)
    collective = Collective(
        kind=Kind.REDUCESCATTER,
        process_set=process_set,
        name=label(name, compressed[0], ignore_name_scope=ignore_name_scope),
        op=op,
        prescale=factors[0],
        postscale=factors[1],
    )
    results = _scattered(compressed, collective)
    return [compression.decompress(result, context) for result, context in zip(results, contexts, strict=True)]


def _scattered(tensors: Sequence[tf.Tensor], collective: Collective) -> list[tf.Tensor]:
    process_set = collective.process_set

    @custom_gradient
    def differentiable(*values: tf.Tensor) -> Any:
        def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
            gather = Collective(kind=Kind.ALLGATHER, process_set=process_set, name=gradient_label(collective.name))
            factor = tf.constant(collective.prescale * collective.postscale, tf.float64)
            if collective.op == ReduceOp.SUM:
                factor *= tf.cast(num_members_op(process_set), tf.float64)
            whole = gathered(upstream, gather)
            return [
                tf.ensure_shape(_scaled(each, factor), value.shape) for each, value in zip(whole, values, strict=True)
            ]

        return call(collective.begin, values, [t.dtype for t in values], [any_rows(t.shape) for t in values]), gradient

    return list(differentiable(*tensors))


def _scaled(tensor: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    """``tensor * factor``, computed in float32 for 16-bit floats."""
    wide = tf.float32 if tensor.dtype in (tf.float16, tf.bfloat16) else tensor.dtype
    return tf.cast(tf.cast(tensor, wide) * tf.cast(factor, wide), tensor.dtype)
