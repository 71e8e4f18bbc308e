"""The transport of a world, or a process set, of one rank: nothing to move."""

from __future__ import annotations

from typing import ClassVar

import torch

from hvd_cluster.engine.signature import ReduceOp
from hvd_cluster.engine.transports.transport import FinishedWork, Transport, Work


class AloneTransport(Transport):
    """Every collective of one rank is done at once, on the device of its buffers.

    Args:
        device: the device of the buffers.
        rank: the global rank.
    """

    name: ClassVar[str] = "ALONE"

    def __init__(self, device: torch.device, rank: int) -> None:
        self.device = device
        self.index = 0
        self.ranks = (rank,)

    def allreduce(self, buffer: torch.Tensor, op: ReduceOp) -> Work:
        return FinishedWork()

    def allgather(self, output: torch.Tensor, buffer: torch.Tensor) -> Work:
        output.copy_(buffer)
        return FinishedWork()

    def broadcast(self, buffer: torch.Tensor, root_index: int) -> Work:
        return FinishedWork()

    def alltoall(
        self, output: torch.Tensor, buffer: torch.Tensor, output_bytes: list[int], input_bytes: list[int]
    ) -> Work:
        self.require_equal_sizes(output_bytes, input_bytes)
        output.copy_(buffer)
        return FinishedWork()

    def abort(self) -> None:
        """Nothing can be in progress."""

    def close(self) -> None:
        """Nothing is held."""
