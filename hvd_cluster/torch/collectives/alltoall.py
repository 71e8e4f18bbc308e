"""Alltoall: every rank sends a slice of its tensor to each, and receives one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvd_cluster.engine.membership import rows_by_rank
from hvd_cluster.engine.none_arguments import none_is_default
from hvd_cluster.engine.process_sets import ProcessSet, global_process_set
from hvd_cluster.engine.request import Handle
from hvd_cluster.engine.signature import Kind
from hvd_cluster.engine.submission import submit
from hvd_cluster.torch.collectives.differentiable import differentiable
from hvd_cluster.torch.submission import checked, keep


@none_is_default
def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send a slice of the rows to each rank.

    Args:
        tensor: shape (rows, ...); ``rows`` may differ between ranks; the other dimensions are the same on all ranks.
        splits: int32 of shape (ranks,): the number of rows to send to each rank. By default the rows are split equally.
        name: matches the call with those of the other ranks.
        process_set: the ranks that take part.

    Returns:
        A tensor of shape (received rows, ...), in the order of the ranks; with ``splits``, a pair of this tensor and
        the number of rows from each rank, int32 of shape (ranks,). The gradient of a row returns to the rank that sent
        it.

    Raises:
        ValueError: the tensor has an unsupported dtype, layout or device, or ``splits`` does not match it.
        HorovodInternalError: the ranks disagree, the tensor has no dimension, or the job has ended.
    """
    output, received = _alltoall(tensor, _checked_splits(tensor, splits, process_set), name, process_set)
    return output if splits is None else (output, received)


@none_is_default
def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin :func:`alltoall`, and return a handle for :func:`synchronize`.

    The result is not differentiable.
    """
    rows = _checked_splits(tensor, splits, process_set)
    return keep(_submit(tensor, rows, name, process_set, splits is not None))


def _submit(
    tensor: torch.Tensor,
    splits: tuple[int, ...],
    name: str | None,
    process_set: ProcessSet,
    with_received: bool,
    is_waited_for: bool = False,
) -> Handle:
    return submit(
        Kind.ALLTOALL,
        [tensor],
        process_set=process_set,
        name=name,
        splits=splits,
        prepare=checked,
        finish=lambda results: tuple(results) if with_received else results[0],
        is_waited_for=is_waited_for,
    )


def _checked_splits(
    tensor: torch.Tensor, splits: torch.Tensor | Sequence[int] | None, process_set: ProcessSet
) -> tuple[int, ...]:
    """The number of rows for each rank."""
    checked([tensor])
    if splits is not None and not isinstance(splits, torch.Tensor):
        splits = torch.tensor(splits, dtype=torch.int32, device="cpu")
    return rows_by_rank(tensor, [] if splits is None else [splits], process_set)


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, splits: tuple[int, ...], name: str | None, process_set: ProcessSet
    ) -> tuple[torch.Tensor, torch.Tensor]:
        output, received = _submit(tensor, splits, name, process_set, True, is_waited_for=True).wait()
        ctx.rows, ctx.received, ctx.process_set = tensor.shape[0], received, process_set
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> tuple[Any, ...]:
        counts = tuple(ctx.received.tolist())
        back, _ = _alltoall(gradient.contiguous(), counts, None, ctx.process_set)
        # Rows after the last split were not sent.
        unsent = back.new_zeros((ctx.rows - back.shape[0], *back.shape[1:]))
        return torch.cat([back, unsent]), None, None, None


_alltoall: Callable[..., tuple[torch.Tensor, torch.Tensor]] = differentiable(_Alltoall)
