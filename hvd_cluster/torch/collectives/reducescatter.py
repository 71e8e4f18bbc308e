"""Reducescatter of one tensor or a group: each rank gets rows of the reduction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from hvd_cluster.engine.membership import num_members
from hvd_cluster.engine.none_arguments import none_is_default
from hvd_cluster.engine.process_sets import ProcessSet, global_process_set
from hvd_cluster.engine.signature import Kind, ReduceOp
from hvd_cluster.engine.submission import scatter_op
from hvd_cluster.torch.collectives.allgather import grouped_allgather
from hvd_cluster.torch.collectives.differentiable import differentiable
from hvd_cluster.torch.compression import Compression, Compressor
from hvd_cluster.torch.submission import keep, submit_tensors


@none_is_default
def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduce a tensor over all ranks and keep this rank's rows of the result.

    Args:
        tensor: shape (rows, ...), equal on all ranks. The rows are assigned to the ranks in order and as equally as
            possible; the first ``rows % ranks`` ranks get one more.
        name: matches the call with those of the other ranks.
        compression: how the tensor is compressed for transfer.
        op: Average or Sum.
        process_set: the ranks that take part.
        prescale_factor: multiplies the tensor before the reduction.
        postscale_factor: multiplies the result.

    Returns:
        A new tensor of this rank's rows. Its gradient is the allgather of the gradients, multiplied by the factors
        and, for Sum, by the number of ranks.

    Raises:
        ValueError: the tensor has an unsupported dtype, layout or device, ``op`` is neither Average nor Sum, or a bool
            tensor would be averaged or scaled.
        HorovodInternalError: the ranks disagree, the tensor has no dimension, or the job has ended.
    """
    factors = (prescale_factor, postscale_factor)
    (result,) = grouped_reducescatter([tensor], name, compression, op, process_set, *factors)
    return result


@none_is_default
def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begin :func:`reducescatter`, and return a handle for :func:`synchronize`.

    The result is not differentiable.
    """
    arguments = (name, scatter_op(op), prescale_factor, postscale_factor, process_set)
    return keep(_submit([tensor], *arguments))


@none_is_default
def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """:func:`reducescatter` of several tensors as one request."""
    tensors = list(tensors)
    if not tensors:
        return []
    compressed, ctxs = zip(*(compression.compress(tensor) for tensor in tensors), strict=True)
    arguments = (scatter_op(op), prescale_factor, postscale_factor, process_set)
    results = _reducescatter(name, *arguments, *compressed)
    return [compression.decompress(result, ctx) for result, ctx in zip(results, ctxs, strict=True)]


@none_is_default
def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: ReduceOp = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begin :func:`grouped_reducescatter`; return a handle for :func:`synchronize`.

    The results are not differentiable.
    """
    arguments = (name, scatter_op(op), prescale_factor, postscale_factor, process_set)
    return keep(_submit(tensors, *arguments, as_list=True))


_submit = partial(submit_tensors, Kind.REDUCESCATTER)


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        name: str | None,
        op: ReduceOp,
        prescale: float,
        postscale: float,
        process_set: ProcessSet,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.process_set = process_set
        ctx.factor = prescale * postscale * (num_members(process_set) if op == ReduceOp.SUM else 1)
        arguments = (name, op, prescale, postscale, process_set)
        return tuple(_submit(tensors, *arguments, as_list=True, is_waited_for=True).wait())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        dense = [gradient.contiguous() for gradient in gradients]
        gathered = grouped_allgather(dense, process_set=ctx.process_set)
        return (None,) * 5 + tuple(gradient * ctx.factor for gradient in gathered)


_reducescatter: Callable[..., tuple[torch.Tensor, ...]] = differentiable(_Reducescatter)
