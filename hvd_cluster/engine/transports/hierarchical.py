"""Allreduce between hosts: shared memory inside each host, and Gloo between one rank of each.

Over the network every tensor then travels once per host, not once per rank: for 2 hosts of 2 ranks a flat ring moves
1.5 times its size over the link, and this moves it once. Everything but an allreduce goes through the flat ring.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import ClassVar

import torch

from hvd_cluster.engine.buffers import as_bytes
from hvd_cluster.engine.request import ReduceOp
from hvd_cluster.engine.transports.gloo import GlooTransport
from hvd_cluster.engine.transports.shm import ShmTransport
from hvd_cluster.engine.transports.transport import Transport, Work

#: The network works on a piece while the hosts reduce the next one.
_PIECE_BYTES = 4 << 20


class HierarchicalTransport(Transport):
    """Three transports as one, which it owns.

    Args:
        flat: among all ranks of the process set.
        within: among the ranks of this host, whose first one leads; None where this rank is alone on its host.
        between: among the leaders; None on the others.
    """

    name: ClassVar[str] = "HIERARCHICAL"
    # What follows an allreduce within the host has to wait until the leader is back from the network.
    is_exclusive: ClassVar[bool] = True

    def __init__(self, flat: GlooTransport, within: ShmTransport | None, between: GlooTransport | None) -> None:
        self.device = flat.device
        self.ranks = flat.ranks
        self.index = flat.index
        self._flat = flat
        self._within = within
        self._between = between

    def reduces(self, dtype: torch.dtype) -> bool:
        return self._flat.reduces(dtype)

    def allreduce(self, buffer: torch.Tensor, op: ReduceOp) -> Work:
        works: list[Work] = []
        for piece in buffer.split(max(1, _PIECE_BYTES // buffer.element_size())):
            if self._within is not None:
                self._within.allreduce(piece, op)
            if self._between is not None:
                works.append(self._between.allreduce(piece, op))
        return _SpreadWithinHost(works, buffer, self._within)

    def allgather(self, output: torch.Tensor, buffer: torch.Tensor) -> Work:
        return self._flat.allgather(output, buffer)

    def broadcast(self, buffer: torch.Tensor, root_index: int) -> Work:
        return self._flat.broadcast(buffer, root_index)

    def alltoall(
        self, output: torch.Tensor, buffer: torch.Tensor, output_bytes: list[int], input_bytes: list[int]
    ) -> Work:
        return self._flat.alltoall(output, buffer, output_bytes, input_bytes)

    def barrier(self) -> Work:
        return self._flat.barrier()

    def abort(self) -> None:
        for transport in self._parts():
            transport.abort()

    def close(self) -> None:
        for transport in self._parts():
            transport.close()

    def _parts(self) -> list[Transport]:
        parts = (self._between, self._within, self._flat)
        return [part for part in parts if part is not None]


class _SpreadWithinHost(Work):
    """The leader's result is on its way; when it is here, every rank of the host takes it.

    Args:
        works: what is under way between the hosts; empty on a rank that does not lead.
        buffer: where the result stands on the leader, and goes to on the others.
        within: the ranks of this host.
    """

    def __init__(self, works: list[Work], buffer: torch.Tensor, within: ShmTransport | None) -> None:
        self._works = works
        self._buffer = buffer
        self._within = within

    def on_done(self, callback: Callable[[], None]) -> None:
        if not self._works:
            callback()  # a rank that does not lead waits for its leader in result()
            return
        lock, left = threading.Lock(), list(self._works)

        def one_is_done() -> None:
            with lock:  # Gloo's threads come at the same time
                left.pop()
                is_last = not left
            if is_last:
                callback()

        for work in self._works:
            work.on_done(one_is_done)

    def result(self) -> None:
        for work in self._works:
            work.result()
        if self._within is not None:
            self._within.broadcast_from_leader(as_bytes(self._buffer))
