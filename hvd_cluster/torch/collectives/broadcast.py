"""Broadcast: every rank gets the root's tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hvd_cluster.engine import basics
from hvd_cluster.engine.none_arguments import none_is_default
from hvd_cluster.engine.process_sets import ProcessSet, global_process_set
from hvd_cluster.engine.request import Handle
from hvd_cluster.engine.signature import Kind
from hvd_cluster.torch.collectives.allreduce import allreduce
from hvd_cluster.torch.collectives.differentiable import differentiable
from hvd_cluster.torch.submission import keep, submit_tensors


@none_is_default
def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Broadcast the root's tensor to all ranks.

    Args:
        tensor: any shape; the same shape and dtype on all ranks.
        root_rank: the global rank whose tensor is broadcast; a member of the process set.
        name: matches the call with those of the other ranks.
        process_set: the ranks that take part.

    Returns:
        A new tensor. Its gradient is the averaged gradient on the root, and zero on other ranks.

    Raises:
        ValueError: the tensor has an unsupported dtype, layout or device, or there is no such root.
        HorovodInternalError: the ranks disagree, or the job has ended.
    """
    return _broadcast(tensor, root_rank, name, process_set)


@none_is_default
def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin :func:`broadcast`, and return a handle for :func:`synchronize`.

    The result is not differentiable.
    """
    return keep(submit_broadcast(tensor, root_rank, name, process_set))


@none_is_default
def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """In-place :func:`broadcast`; returns ``tensor``."""
    submit_broadcast(tensor, root_rank, name, process_set, in_place=True, is_waited_for=True).wait()
    return tensor


@none_is_default
def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """In-place :func:`broadcast_async`."""
    return keep(submit_broadcast(tensor, root_rank, name, process_set, in_place=True))


def submit_broadcast(
    tensor: torch.Tensor, root: int, name: str | None, process_set: ProcessSet, **options: Any
) -> Handle:
    """Submit a broadcast; the options are those of :func:`submit_tensors`."""
    return submit_tensors(Kind.BROADCAST, [tensor], name, process_set=process_set, root=root, **options)


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet
    ) -> torch.Tensor:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        handle = submit_broadcast(tensor, root_rank, name, process_set, is_waited_for=True)
        result: torch.Tensor = handle.wait()
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        average = allreduce(gradient.contiguous(), process_set=ctx.process_set)
        if basics.rank() != ctx.root_rank:
            # Zeros that autograd still takes for a function of the average: a second backward pass differentiates the
            # allreduce above, so all ranks must do so. Not a product with 0, which is NaN for an infinite gradient.
            average = average.masked_fill(torch.ones_like(average, dtype=torch.bool), 0)
        return average, None, None, None


_broadcast: Callable[..., torch.Tensor] = differentiable(_Broadcast)
