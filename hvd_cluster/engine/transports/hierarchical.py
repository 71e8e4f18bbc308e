"""Allreduce between hosts: shared memory inside each host, and Gloo between one rank of each.

Over the network every tensor then travels once per host, not once per rank: for 2 hosts of 2 ranks a flat ring moves
1.5 times its size over the link, and this moves it once. Everything but an allreduce goes through the flat ring.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch

from hvd_cluster.engine.buffers import as_bytes
from hvd_cluster.engine.request import ReduceOp
from hvd_cluster.engine.transports.gloo import GlooTransport
from hvd_cluster.engine.transports.shm import ShmTransport
from hvd_cluster.engine.transports.transport import Transport, Work

#: The network works on a piece while the hosts reduce the next one.
_PIECE_BYTES = 4 << 20
#: Less goes through the flat ring: two more meetings within the host cost more than the link saves.
_LEAST_BYTES = 1 << 20
#: How often a waiting leader looks whether the others still live.
_CHECK_PERIOD_S = 0.05


class HierarchicalTransport(Transport):
    """Three transports as one, which it owns.

    Args:
        flat: among all ranks of the process set.
        within: among the ranks of this host, whose first one leads; None where this rank is alone on its host.
        between: among the leaders; None on the others.
        check: called now and then while waiting; raises when the world is broken.
    """

    name: ClassVar[str] = "HIERARCHICAL"
    # What follows an allreduce within the host has to wait until the leader is back from the network.
    is_exclusive: ClassVar[bool] = True

    def __init__(
        self,
        flat: GlooTransport,
        within: ShmTransport | None,
        between: GlooTransport | None,
        check: Callable[[], None],
    ) -> None:
        self.device = flat.device
        self.ranks = flat.ranks
        self.index = flat.index
        self._flat = flat
        self._within = within
        self._between = between
        self._check = check

    def reduces(self, dtype: torch.dtype) -> bool:
        return self._flat.reduces(dtype)

    def allreduce(self, buffer: torch.Tensor, op: ReduceOp) -> Work:
        if buffer.nbytes < _LEAST_BYTES:
            return self._flat.allreduce(buffer, op)
        works: list[Work] = []
        pieces = buffer.split(max(1, _PIECE_BYTES // buffer.element_size()))
        for piece in pieces:
            if self._within is not None:
                self._within.allreduce(piece, op)
            if self._between is not None:
                works.append(self._between.allreduce(piece, op))
        return _SpreadWithinHost(works, pieces, self._within, self._check)

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
    """The leader's result is on its way; as its pieces come, every rank of the host takes them.

    Args:
        works: what is under way between the hosts, piece by piece; empty on a rank that does not lead.
        pieces: where the result stands on the leader, and goes to on the others.
        within: the ranks of this host.
        check: called now and then while waiting; raises when the world is broken.
    """

    def __init__(
        self,
        works: list[Work],
        pieces: Sequence[torch.Tensor],
        within: ShmTransport | None,
        check: Callable[[], None],
    ) -> None:
        self._works = works
        self._pieces = pieces
        self._within = within
        self._check = check
        self._arrived = [threading.Event() for _ in works]

    def on_done(self, callback: Callable[[], None]) -> None:
        if not self._works:
            callback()  # a rank that does not lead waits for its leader in result()
            return
        # The last quarter may arrive while the host takes the rest.
        due = self._works[len(self._works) * 3 // 4]
        for work, arrived in zip(self._works, self._arrived, strict=True):
            work.on_done(arrived.set)
        due.on_done(callback)

    def result(self) -> None:
        for number, piece in enumerate(self._pieces):
            if self._works:
                # Gloo's own wait would not notice the death of a rank that is no neighbour in its ring.
                while not self._arrived[number].wait(_CHECK_PERIOD_S):
                    self._check()
                self._works[number].result()
            if self._within is not None:
                self._within.broadcast_from_leader(as_bytes(piece))
