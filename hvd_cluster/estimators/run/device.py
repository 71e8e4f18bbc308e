"""The device that a worker trains on."""

from __future__ import annotations

from typing import Any

import torch


def choose_device(use_gpu: bool, hvd: Any) -> torch.device:
    """The device of this rank: the GPU at its local_rank, or the CPU; the same kind on all ranks.

    Raises:
        RuntimeError: the ranks differ, or a rank would have to share a GPU; on every rank, with all their devices.
    """
    local_rank = hvd.local_rank()
    count = torch.cuda.device_count() if use_gpu and torch.cuda.is_available() else 0
    mine = "cpu" if count == 0 else "cuda" if local_rank < count else "none left"
    kinds = hvd.allgather_object(mine, name="hvd_cluster.devices")
    if len(set(kinds)) > 1:
        listed = ", ".join(f"rank {rank}: {kind}" for rank, kind in enumerate(kinds))
        raise RuntimeError(
            f"All ranks don't have same device type! ({listed}) Each worker needs a GPU of its own: "
            "give the job as many GPUs as workers, lower num_proc, or set use_gpu=False."
        )
    if mine == "cpu":
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)
