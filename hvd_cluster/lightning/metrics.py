"""torchmetrics over all ranks, without torch.distributed."""

from __future__ import annotations

import math
from typing import Any

import torch

import hvd_cluster.torch as hvd


def connect(module: torch.nn.Module) -> None:
    """Let the torchmetrics metrics in ``module`` gather their state from all ranks if they have no ``dist_sync_fn``."""
    for part in module.modules():
        if hasattr(part, "distributed_available_fn") and getattr(part, "dist_sync_fn", ...) is None:
            part.dist_sync_fn = gather  # type: ignore[assignment]
            part.distributed_available_fn = is_distributed  # type: ignore[assignment]


def is_distributed() -> bool:
    """Whether there are other ranks to gather from."""
    return hvd.is_initialized() and hvd.size() > 1


def gather(tensor: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
    """The tensors of all ranks, by rank. They have the same number of dimensions; sizes may differ.

    Args:
        tensor: the tensor of this rank.
        group: the process set that takes part; None for all ranks.
    """
    process_set = hvd.global_process_set if group is None else group
    if not tensor.dim():
        return list(hvd.allgather(tensor.reshape(1), process_set=process_set).unbind())
    shapes = hvd.allgather(torch.tensor([tensor.shape]), process_set=process_set).tolist()
    everything = hvd.allgather(tensor.reshape(-1), process_set=process_set)
    parts = everything.split([math.prod(shape) for shape in shapes])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
