"""Allreduce of one tensor or of a group.

Every rank gets the reduction of all ranks' tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvd_cluster.engine import submission
from hvd_cluster.engine.none_arguments import none_is_default
from hvd_cluster.engine.process_sets import ProcessSet, global_process_set
from hvd_cluster.engine.signature import Kind, ReduceOp
from hvd_cluster.engine.submission import Collective, Tensors, Waitable, reduce_op
from hvd_cluster.tensorflow.collectives.allgather import gathered
from hvd_cluster.tensorflow.compression import Compression, Compressor
from hvd_cluster.tensorflow.custom_gradient import custom_gradient
from hvd_cluster.tensorflow.interop import call, dense
from hvd_cluster.tensorflow.naming import gradient_label, label
from hvd_cluster.tensorflow.rank_ops import num_members_op


@none_is_default
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Reduce a tensor over all ranks.

    Args:
        tensor: a tensor of any shape, with the same shape and dtype on all ranks; or ``tf.IndexedSlices``, whose rows
            are gathered and, for Average, divided by the number of ranks.
        average: deprecated; True is ``op=Average``, False is ``op=Sum``.
        device_dense: accepted and ignored: tensors stay on their device.
        device_sparse: accepted and ignored.
        compression: how the tensor is compressed for transfer.
        op: Average (the default), Sum, Adasum, Min, Max or Product.
        prescale_factor: multiplies the tensor before the reduction.
        postscale_factor: multiplies the result, together with Average's division. Integers are scaled in float64
            and truncated.
        name: matches the call with those of the other ranks.
        process_set: the ranks that take part.
        ignore_name_scope: do not prepend the graph's name scope to the name.

    Returns:
        A new tensor, or ``tf.IndexedSlices``. Its gradient is the allreduce of the gradient with the same op and
        factors.

    Raises:
        tf.errors.InvalidArgumentError: the tensor has an unsupported dtype.
        tf.errors.FailedPreconditionError: the ranks disagree (UnknownError with the same text in a graph).
        tf.errors.UnknownError: the job has ended.
        NotImplementedError: IndexedSlices with an op other than Sum and Average, or with factors.
    """
    del device_dense, device_sparse
    (result,) = _grouped(
        [tensor],
        reduce_op(average, op),
        compression,
        (prescale_factor, postscale_factor),
        name,
        process_set,
        ignore_name_scope,
    )
    return result


@none_is_default
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> Any:
    """:func:`allreduce` of several tensors as one request: all or none."""
    del device_dense, device_sparse
    if not tensors:
        return tensors
    factors = (prescale_factor, postscale_factor)
    return _grouped(tensors, reduce_op(average, op), compression, factors, name, process_set, ignore_name_scope)


def reduced(
    tensors: Sequence[tf.Tensor],
    collective: Collective,
    groups: Sequence[Sequence[int]] | None = None,
    *,
    ends_step: bool = False,
) -> list[tf.Tensor]:
    """Allreduce of dense tensors; differentiable.

    Args:
        tensors: dense tensors.
        collective: the reduction, with its name.
        groups: indices of the tensors to reduce together; None for all tensors, an empty list for an automatic choice.
        ends_step: as for :func:`~hvd_cluster.tensorflow.interop.call`.
    """

    def begin(given: Tensors, is_waited_for: bool) -> Waitable:
        if groups is None:
            return collective.begin(given, is_waited_for)
        return collective.begin_parts(given, is_waited_for, groups=groups)

    @custom_gradient
    def differentiable(*values: tf.Tensor) -> Any:
        def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
            return reduced(upstream, collective.named(gradient_label(collective.name)), groups)

        shapes = [value.shape for value in values]
        return call(begin, values, [value.dtype for value in values], shapes, ends_step=ends_step), gradient

    return list(differentiable(*tensors))


def sparse_sum(
    slices: Sequence[tf.IndexedSlices],
    shapes: Sequence[tf.TensorShape],
    op: ReduceOp,
    process_set: ProcessSet,
    name: str | None,
    *,
    compression: type[Compressor] = Compression.none,
    ends_step: bool = False,
) -> list[tf.IndexedSlices]:
    """The gathered rows of all ranks; an index of several ranks occurs several times.

    Args:
        slices: the rows of this rank.
        shapes: the dense shape of each, as far as it is known.
        op: Average or Sum.
        process_set: the ranks that take part.
        name: matches the call with those of the other ranks.
        compression: how the rows are compressed for transfer.
        ends_step: as for :func:`~hvd_cluster.tensorflow.interop.call`.
    """
    compressed, contexts = zip(*(compression.compress(dense(each.values)) for each in slices), strict=True)
    flat = [part for rows, each in zip(compressed, slices, strict=True) for part in (rows, dense(each.indices))]
    collective = Collective(
        kind=Kind.ALLGATHER,
        process_set=process_set,
        name=name,
        op=op,
        sparse_shapes=tuple(
            tuple(-1 if length is None else length for length in shape.as_list()) if shape.rank else ()
            for shape in shapes
        ),
    )
    parts = gathered(flat, collective, ends_step=ends_step)
    values = [compression.decompress(rows, context) for rows, context in zip(parts[::2], contexts, strict=True)]
    indices = parts[1::2]
    if op == ReduceOp.AVERAGE:
        number = num_members_op(process_set)
        values = [each / tf.cast(number, each.dtype) for each in values]
    return [
        tf.IndexedSlices(each_values, each_indices, dense_shape=each.dense_shape)
        for each, each_values, each_indices in zip(slices, values, indices, strict=True)
    ]


def check_adasum(tensors: Sequence[Any], process_set: ProcessSet) -> None:
    """Raise if Adasum is not defined for these arguments.

    Raises:
        NotImplementedError: a process set, a number of ranks that is not a power of two, integers or sparse tensors.
    """
    submission.check_adasum(process_set)
    if any(isinstance(tensor, tf.IndexedSlices) or not tensor.dtype.is_floating for tensor in tensors):
        raise NotImplementedError("Adasum needs dense floating-point tensors")


def _grouped(
    given: Sequence[Any],
    op: ReduceOp,
    compression: type[Compressor],
    factors: tuple[float, float],
    name: str | None,
    process_set: ProcessSet,
    ignore_name_scope: bool,
) -> list[Any]:
    """Reduce dense tensors in one request, and sparse tensors' rows in another."""
    results: list[Any] = [each if isinstance(each, tf.IndexedSlices) else dense(each) for each in given]
    if op == ReduceOp.ADASUM:
        check_adasum(results, process_set)
    sparse = [index for index, each in enumerate(results) if isinstance(each, tf.IndexedSlices)]
    full = [index for index, each in enumerate(results) if not isinstance(each, tf.IndexedSlices)]
    if sparse and (op not in (ReduceOp.AVERAGE, ReduceOp.SUM) or factors != (1.0, 1.0)):
        raise NotImplementedError(
            "tf.IndexedSlices support only op=hvd.Sum and op=hvd.Average without prescale_factor and postscale_factor: "
            "pass tf.convert_to_tensor(...) instead"
        )
    if full:
        compressed, contexts = zip(*(compression.compress(results[index]) for index in full), strict=True)
        collective = Collective(
            kind=Kind.ALLREDUCE,
            process_set=process_set,
            name=label(name, compressed[0], ignore_name_scope=ignore_name_scope),
            op=op,
            prescale=factors[0],
            postscale=factors[1],
        )
        for index, result, context in zip(full, reduced(compressed, collective), contexts, strict=True):
            results[index] = compression.decompress(result, context)
    if sparse:
        slices = [results[index] for index in sparse]
        request_name = label(name, slices[0].values, ignore_name_scope=ignore_name_scope)
        shapes = [tf.TensorShape(tf.get_static_value(each.dense_shape)) for each in slices]
        sums = sparse_sum(slices, shapes, op, process_set, request_name, compression=compression)
        for index, result in zip(sparse, sums, strict=True):
            results[index] = result
    return results
