"""Allreduce of one tensor or of a group: every rank gets the reduction of all ranks' tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from hvd_cluster.engine.process_sets import ProcessSet, global_process_set
from hvd_cluster.engine.request import Kind, ReduceOp
from hvd_cluster.engine.submission import reduce_op
from hvd_cluster.torch.compression import Compression, Compressor, wire_of
from hvd_cluster.torch.submission import keep, submit_tensors


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
        tensor: any shape; equal shape and type on all ranks. bool, 8- to 64-bit integers and 16- to 64-bit floats.
        average: deprecated; True is ``op=Average``, False is ``op=Sum``.
        name: matches the call with those of the other ranks.
        compression: how the tensor travels.
        op: Average (the default), Sum, Min, Max or Product.
        prescale_factor: multiplies the tensor before the reduction.
        postscale_factor: multiplies it afterwards, together with Average's division. Integers are scaled in float64
            and truncated.
        process_set: whose ranks take part.

    Returns:
        A new tensor like ``tensor``. Its gradient is the gradient's allreduce with the same op and factors.

    Raises:
        ValueError: the tensor cannot be sent, or the arguments contradict each other.
        HorovodInternalError: the ranks disagree, or the job has ended.
    """
    arguments = (name, reduce_op(average, op), prescale_factor, postscale_factor, process_set)
    (result,) = _compressed_allreduce([tensor], compression, arguments)
    return result


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """:func:`allreduce` that returns a handle at once; :func:`synchronize` gives the new tensor. No gradient."""
    arguments = (name, reduce_op(average, op), prescale_factor, postscale_factor, process_set)
    return keep(_submit_allreduce([tensor], *arguments))


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """:func:`allreduce` in place; returns ``tensor``."""
    arguments = (name, reduce_op(average, op), prescale_factor, postscale_factor, process_set)
    _submit_allreduce([tensor], *arguments, in_place=True, is_waited_for=True).wait()
    return tensor


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """:func:`allreduce_async` in place: ``tensor`` holds the result once :func:`synchronize` has returned it."""
    arguments = (name, reduce_op(average, op), prescale_factor, postscale_factor, process_set)
    return keep(_submit_allreduce([tensor], *arguments, in_place=True))


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
    """:func:`allreduce` of several tensors as one request: all of them are reduced, or none is."""
    arguments = (name, reduce_op(average, op), prescale_factor, postscale_factor, process_set)
    tensors = list(tensors)  # model.parameters() is gone once it is read
    return _compressed_allreduce(tensors, compression, arguments) if tensors else []


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """:func:`grouped_allreduce` that returns one handle at once; :func:`synchronize` gives the list."""
    arguments = (name, reduce_op(average, op), prescale_factor, postscale_factor, process_set)
    return keep(_submit_allreduce(tensors, *arguments, as_list=True))


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """:func:`grouped_allreduce` in place; returns ``tensors`` as a list."""
    arguments = (name, reduce_op(average, op), prescale_factor, postscale_factor, process_set)
    handle = _submit_allreduce(tensors, *arguments, in_place=True, as_list=True, is_waited_for=True)
    result: list[torch.Tensor] = handle.wait()
    return result


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """:func:`grouped_allreduce_async` in place."""
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


# autograd.Function.apply is untyped.
_allreduce: Callable[..., tuple[torch.Tensor, ...]] = _Allreduce.apply
