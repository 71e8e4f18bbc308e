"""Allgather of one tensor or of a group.

Every rank gets all ranks' tensors, concatenated along the first dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvd_cluster.engine.membership import member_index
from hvd_cluster.engine.none_arguments import none_is_default
from hvd_cluster.engine.process_sets import ProcessSet, global_process_set
from hvd_cluster.engine.signature import Kind
from hvd_cluster.torch.collectives.allreduce import grouped_allreduce
from hvd_cluster.torch.collectives.differentiable import differentiable
from hvd_cluster.torch.submission import keep, submit_tensors


@none_is_default
def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Concatenate the tensors of all ranks along the first dimension.

    Args:
        tensor: shape (rows, ...); ``rows`` may be 0 and may differ between ranks; the other dimensions are the same.
        name: matches the call with those of the other ranks.
        process_set: the ranks that take part.

    Returns:
        A tensor of shape (sum of rows, ...), in the order of the ranks. Its gradient is this rank's slice of the
        averaged gradients, as in Horovod.

    Raises:
        ValueError: the tensor cannot be sent.
        HorovodInternalError: the ranks disagree, the tensor has no dimension, or the job has ended.
    """
    (result,) = _allgather(name, process_set, tensor)
    return result


@none_is_default
def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Begin :func:`allgather`, and return a handle for :func:`synchronize`.

    The result is not differentiable.
    """
    return keep(submit_tensors(Kind.ALLGATHER, [tensor], name, process_set=process_set))


@none_is_default
def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """:func:`allgather` of several tensors as one request."""
    tensors = list(tensors)
    return list(_allgather(name, process_set, *tensors)) if tensors else []


@none_is_default
def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin :func:`grouped_allgather`; return one handle for :func:`synchronize`.

    The results are not differentiable.
    """
    return keep(submit_tensors(Kind.ALLGATHER, tensors, name, process_set=process_set, as_list=True))


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, name: str | None, process_set: ProcessSet, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.process_set = process_set
        options: Any = {"process_set": process_set, "as_list": True, "is_waited_for": True}
        results = submit_tensors(Kind.ALLGATHER, tensors, name, **options).wait()
        ctx.rows = [tensor.shape[0] for tensor in tensors]
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        process_set = ctx.process_set
        # Autograd passes zeros for integers and bools, which have no gradient.
        real = [i for i, gradient in enumerate(gradients) if gradient.is_floating_point()]
        averages = grouped_allreduce([gradients[i].contiguous() for i in real], process_set=process_set)
        rows = allgather(torch.tensor([ctx.rows], device="cpu"), process_set=process_set)  # (ranks, tensors)
        before = rows[: member_index(process_set)].sum(dim=0).tolist()
        slices: list[torch.Tensor | None] = [None] * len(gradients)
        for i, average in zip(real, averages, strict=True):
            slices[i] = average[before[i] : before[i] + ctx.rows[i]]
        return (None, None, *slices)


_allgather: Callable[..., tuple[torch.Tensor, ...]] = differentiable(_Allgather)
