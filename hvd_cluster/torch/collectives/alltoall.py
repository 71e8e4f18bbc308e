"""Alltoall: every rank sends a slice of its tensor to each rank, and gets the slices meant for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvd_cluster.engine.process_sets import ProcessSet, global_process_set
from hvd_cluster.engine.request import Handle, Kind
from hvd_cluster.engine.submission import rows_by_rank, submit
from hvd_cluster.torch.submission import checked, keep


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send a slice of the rows to each rank.

    Args:
        tensor: shape (rows, ...); ``rows`` may differ between ranks, the rest is equal on all of them.
        splits: int32 of shape (ranks,): how many rows go to each rank. Without it the rows are split equally.
        name: matches the call with those of the other ranks.
        process_set: whose ranks take part.

    Returns:
        A tensor of shape (received rows, ...), in the order of the ranks; with ``splits`` a pair of it and
        the rows that came from each rank, int32 of shape (ranks,). Its gradient goes back the way the rows
        came.

    Raises:
        ValueError: the tensor cannot be sent, or ``splits`` does not describe it.
        HorovodInternalError: the ranks disagree, the tensor has no dimension, or the job has ended.
    """
    output, received = _alltoall(tensor, _checked_splits(tensor, splits, process_set), name, process_set)
    return output if splits is None else (output, received)


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """:func:`alltoall` that returns a handle at once. No gradient."""
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
    """The rows for each rank."""
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


# autograd.Function.apply is untyped.
_alltoall: Callable[..., tuple[torch.Tensor, torch.Tensor]] = _Alltoall.apply
