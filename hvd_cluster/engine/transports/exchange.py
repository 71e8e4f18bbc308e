"""The memory in which a host's ranks combine, in pieces, what their leader sends.

Every rank copies its part of a piece into its own slot; each reduces its share of all slots into the piece's buffer.
The leader sends from that buffer and receives into it; then every rank copies it out. So an element is copied twice and
added once on its way through a host.

Why no rank overwrites what another one still uses: operations do not overlap. There is a barrier for each piece, after
the slots are filled, and one more at the end of an operation.

- A slot is filled for every second piece. A rank that fills it for piece p has passed the barrier of piece p - 1, which
  the others reached after they had reduced piece p - 2.
- A buffer is written after the barrier of its piece. A rank reaches that barrier when it has copied out what the buffer
  held before.
- The leader sends piece p after the barrier of p + 1, or the one at the end: by then all have reduced their shares.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable

import torch

from hvd_cluster.engine.shared_memory.deadline import Check, Deadline
from hvd_cluster.engine.shared_memory.semaphores import STRIDE_BYTES, Barrier, Semaphores
from hvd_cluster.engine.transports.chunks import Arithmetic, Chunk, Scratch, scatter

#: Pieces in progress at once, each in its own buffer.
NUM_BUFFERS = 8
_NUM_SLOTS = 2
#: Long enough that the cost of a collective over the network is small in comparison, short enough to hide the work of
#: the hosts: measured at 1 Gbit/s from 0.5 to 4 MiB.
_PIECE_BYTES = 1 << 20
#: The segment of a host stays below this, whatever its number of ranks.
_MAX_BYTES = 128 << 20
#: Where parts begin. Not the page size, which may differ between hosts.
_ALIGNMENT_BYTES = 4096


class HostExchange:
    """One rank's view of it.

    Args:
        memory: :meth:`num_bytes` zero bytes that all ranks of the host share; None for a host of one rank.
        index: this rank's index on the host; the rank with index 0 leads.
        ranks: the global ranks of the host, by index.
        piece_bytes: the size of a piece, from :func:`piece_bytes_for`; the same on all hosts.
        check: called now and then while waiting; raises if the world is broken.
        timeout_s: how long a rank waits for the others at each barrier.
    """

    def __init__(
        self,
        memory: mmap.mmap | None,
        *,
        index: int,
        ranks: tuple[int, ...],
        piece_bytes: int,
        check: Check,
        timeout_s: float,
    ) -> None:
        self.index = index
        self.num_ranks = num_ranks = len(ranks)
        self.piece_bytes = piece_bytes
        self._semaphores: Semaphores | None = None
        self._barrier: Barrier | None = None
        self._slots: torch.Tensor | None = None
        self._num_filled = 0
        self._scratch = Scratch()
        if memory is None:
            self._buffers = torch.empty(NUM_BUFFERS, self.piece_bytes, dtype=torch.uint8, device="cpu")
            return
        count = Barrier.num_semaphores(num_ranks)
        # After those of the barrier, one for each rank: the leader posts it when a piece has arrived.
        self._arrivals = count
        self._semaphores = Semaphores(memory, 0, count + num_ranks, create=index == 0)
        self._barrier = barrier = Barrier(self._semaphores, 0, index, num_ranks)
        self._barrier_deadline = Deadline(check, timeout_s, lambda: [ranks[index] for index in barrier.late()])
        # Longer than the leader itself would wait for the network.
        self._arrival_deadline = Deadline(check, 2 * timeout_s, lambda: ranks[:1], "bring what other hosts have sent")
        # torch.frombuffer does not keep the mapping alive; this object does and outlives its tensors.
        self._memory: mmap.mmap | None = memory
        part = torch.frombuffer(memory, dtype=torch.uint8, count=self.num_bytes(num_ranks, piece_bytes))
        part = part[_control_bytes(num_ranks) :]
        self._buffers, slots = part.split([NUM_BUFFERS * self.piece_bytes, _NUM_SLOTS * num_ranks * self.piece_bytes])
        self._buffers = self._buffers.view(NUM_BUFFERS, self.piece_bytes)
        self._slots = slots.view(_NUM_SLOTS, num_ranks, self.piece_bytes)

    @staticmethod
    def num_bytes(num_ranks: int, piece_bytes: int) -> int:
        """The memory that the exchange of ``num_ranks`` needs."""
        return _control_bytes(num_ranks) + (NUM_BUFFERS + _NUM_SLOTS * num_ranks) * piece_bytes

    def buffer(self, piece: int, length: int, wire: torch.dtype) -> torch.Tensor:
        """The ``length`` elements of a piece."""
        return self._buffers[piece % NUM_BUFFERS].view(wire)[:length]

    def gather(
        self, piece: int, chunk: Chunk, arithmetic: Arithmetic, wire: torch.dtype, after_barrier: Callable[[], None]
    ) -> None:
        """Reduce this host's part of a piece; its buffer is complete at the next barrier.

        Args:
            piece: its number in the operation.
            chunk: its tensors.
            arithmetic: how the elements are reduced.
            wire: the element type of the buffer.
            after_barrier: called after the barrier: what was gathered before is complete.
        """
        result = self.buffer(piece, chunk.length, wire)
        if self._slots is None:
            arithmetic.fill(result, chunk.sources)
            return
        slots = self._slots[self._num_filled % _NUM_SLOTS].view(wire)[:, : chunk.length]
        self._num_filled += 1
        arithmetic.fill(slots[self.index], chunk.sources)
        self.barrier()
        after_barrier()
        # Shares begin at multiples of 16 elements, so that no two ranks write one cache line.
        share = math.ceil(chunk.length / self.num_ranks / 16) * 16
        mine = slice(min(self.index * share, chunk.length), min((self.index + 1) * share, chunk.length))
        if mine.start < mine.stop:
            arithmetic.combine(slots[:, mine].unbind(), result[mine], self._scratch)

    def barrier(self) -> None:
        """Wait for the other ranks of the host."""
        if self._barrier is not None:
            self._barrier.wait(self._barrier_deadline)

    def announce(self) -> None:
        """The leader's part: the next piece has arrived from the network."""
        if self._semaphores is not None:
            for rank in range(1, self.num_ranks):
                self._semaphores.post(self._arrivals + rank)

    def await_arrival(self) -> None:
        """The others' part: wait until the next piece has arrived."""
        if self._semaphores is not None:
            self._semaphores.wait(self._arrivals + self.index, self._arrival_deadline)

    def scatter(self, piece: int, chunk: Chunk, arithmetic: Arithmetic, wire: torch.dtype) -> None:
        """Copy a piece that has arrived into this rank's tensors."""
        scatter(self.buffer(piece, chunk.length, wire), chunk.targets)
        arithmetic.deliver(chunk.targets)

    def close(self) -> None:
        """Release the memory; it is unmapped with its last reference."""
        if self._semaphores is not None:
            self._slots = self._memory = None
            del self._buffers
            self._semaphores.release()
            self._semaphores = None


def piece_bytes_for(num_ranks: int) -> int:
    """The piece size for hosts of at most ``num_ranks``; must be equal on all hosts."""
    most = _MAX_BYTES // (NUM_BUFFERS + _NUM_SLOTS * num_ranks) // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES
    return max(_ALIGNMENT_BYTES, min(_PIECE_BYTES, most))


def _control_bytes(num_ranks: int) -> int:
    num_bytes = (Barrier.num_semaphores(num_ranks) + num_ranks) * STRIDE_BYTES
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
