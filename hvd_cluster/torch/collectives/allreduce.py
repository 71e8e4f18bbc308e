"""Allreduce of one tensor or a group: every rank gets all ranks' reduction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from hvd_cluster.engine.none_arguments import none_is_default
from hvd_cluster.engine.process_sets import ProcessSet, global_process_set
from hvd_cluster.engine.signature import Kind, ReduceOp
from hvd_cluster.engine.submission import reduce_op
from hvd_cluster.torch.collectives.differentiable import differentiable
from hvd_cluster.torch.compression import Compression, Compressor, wire_of
from hvd_cluster.torch.submission import keep, submit_tensors


@none_is_default
def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce a tensor over all ranks.

    Args:
        tensor: any shape; the same shape and dtype on all ranks. bool, 8- to 64-bit integers and 16- to 64-bit floats.
        average: deprecated; True is ``op=Average``, False is ``op=Sum``.
        name: matches the call with those of the other ranks.
        compression: how the tensor is compressed for transfer.
        op: Average (the default), Sum, Min, Max or Product.
        prescale_factor: multiplies the tensor before the reduction.
        postscale_factor: multiplies the result, together with Average's division. Integers are scaled in float64
            and truncated.
        process_set: the ranks that take part.

    Returns:
        A new tensor like ``tensor``. Its gradient is the allreduce of the gradient with the same op and factors.

    Raises:
        ValueError: the tensor has an unsupported dtype, layout or device, or the arguments contradict each other.
        HorovodInternalError: the ranks disagree, or the job has ended.
    """
    arguments = (name, reduce_op(average, op), prescale_factor, postscale_factor, process_set)
    (result,) = _compressed_allreduce([tensor], compression, arguments)
    return result


@none_is_default
def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin :func:`allreduce`, and return a handle for :func:`synchronize`.

    The result is not differentiable.
    """
    arguments = (name, reduce_op(average, op), prescale_factor, postscale_factor, process_set)
    return keep(_submit_allreduce([tensor], *arguments))


@none_is_default
def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """In-place :func:`allreduce`; returns ``tensor``."""
    arguments = (name, reduce_op(average, op), prescale_factor, postscale_factor, process_set)
    _submit_allreduce([tensor], *arguments, in_place=True, is_waited_for=True).wait()
    return tensor


@none_is_default
def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """In-place :func:`allreduce_async`.

    ``tensor`` holds the result when :func:`synchronize` has returned.
    """
    arguments = (name, reduce_op(average, op), prescale_factor, postscale_factor, process_set)
    return keep(_submit_allreduce([tensor], *arguments, in_place=True))


@none_is_default
def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """:func:`allreduce` of several tensors as one request: all are reduced, or none."""
    arguments = (name, reduce_op(average, op), prescale_factor, postscale_factor, process_set)
    tensors = list(tensors)  # model.parameters() can be read only once
    return _compressed_allreduce(tensors, compression, arguments) if tensors else []


@none_is_default
def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin :func:`grouped_allreduce`; return one handle for :func:`synchronize`.

    The results are not differentiable.
    """
    arguments = (name, reduce_op(average, op), prescale_factor, postscale_factor, process_set)
    return keep(_submit_allreduce(tensors, *arguments, as_list=True))


@none_is_default
def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """In-place :func:`grouped_allreduce`; returns ``tensors`` as a list."""
    arguments = (name, reduce_op(average, op), prescale_factor, postscale_factor, process_set)
    handle = _submit_allreduce(tensors, *arguments, in_place=True, as_list=True, is_waited_for=True)
    result: list[torch.Tensor] = handle.wait()
    return result


@none_is_default
def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """In-place :func:`grouped_allreduce_async`."""
    arguments = (name, reduce_op(average, op), prescale_factor, postscale_factor, process_set)
    return keep(_submit_allreduce(tensors, *arguments, in_place=True, as_list=True))


_Arguments = tuple[str | None, ReduceOp, float, float, ProcessSet]


def _compressed_allreduce(
    tensors: Sequence[torch.Tensor], compression: type[Compressor], arguments: _Arguments
) -> list[torch.Tensor]:
    wire = wire_of(compression)
    if wire is not None and arguments[1] != ReduceOp.ADASUM:
        # Converting during the copy needs no additional pass over memory.
        return list(_allreduce(*arguments, wire, *tensors))
    compressed, ctxs = zip(*(compression.compress(tensor) for tensor in tensors), strict=True)
    results = _allreduce(*arguments, None, *compressed)
    return [compression.decompress(result, ctx) for result, ctx in zip(results, ctxs, strict=True)]


_submit_allreduce = partial(submit_tensors, Kind.ALLREDUCE)


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        name: str | None,
        op: ReduceOp,
        prescale: float,
        postscale: float,
        process_set: ProcessSet,
        wire: torch.dtype | None,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.arguments = (op, prescale, postscale, process_set, wire)
        arguments = (name, op, prescale, postscale, process_set)
        return tuple(_submit_allreduce(tensors, *arguments, as_list=True, is_waited_for=True, wire=wire).wait())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        dense = [gradient.contiguous() for gradient in gradients]
        reduced = _allreduce(None, *ctx.arguments, *dense)
        return (None,) * 6 + tuple(reduced)


_allreduce: Callable[..., tuple[torch.Tensor, ...]] = differentiable(_Allreduce)
