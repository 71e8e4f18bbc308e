"""Collectives through memory that the ranks of one host share.

Each rank has two slots in the segment, used in turn. Tensors pass through them in chunks: while a rank fills one slot
the others still read the other one, so a chunk costs one barrier (two where more than two ranks reduce it). Every
element is added by exactly one expression of the same operands in the same order on all ranks, so results are equal
to the last bit.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from hvd_cluster.engine.buffers import flat
from hvd_cluster.engine.request import ReduceOp
from hvd_cluster.engine.scaling import copy_scaled, finish_scaled
from hvd_cluster.engine.transports.semaphores import STRIDE_BYTES, Barrier, Semaphores
from hvd_cluster.engine.transports.transport import Finished, Transport, Work

_PAGE_BYTES = 4096
#: 0.5 to 1 MB was best on the machines measured: long enough to hide the barrier, short enough to stay in the cache.
_SLOT_BYTES = 1 << 20
#: The segment of a host stays below this, whatever its number of ranks.
_MOST_BYTES = 256 << 20
#: How often a waiting rank looks whether the others still live.
_CHECK_PERIOD_S = 0.05

_REDUCE: dict[ReduceOp, Callable[..., Any]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.PRODUCT: torch.mul,
}


def segment_bytes(num_ranks: int) -> int:
    """How large a segment :class:`ShmTransport` needs."""
    return _control_bytes(num_ranks) + 2 * (num_ranks + 1) * _slot_bytes(num_ranks)


class ShmTransport(Transport):
    """Moves tensors through ``segment``. A collective is carried out in the thread that begins it.

    Args:
        segment: :func:`segment_bytes` zero bytes that all ranks share.
        index: this rank's index in the process set.
        ranks: the global ranks of the process set, by index.
        check: called now and then while waiting; raises when the world is broken.
        timeout_s: how long a rank waits for the others within one collective.
    """

    name: ClassVar[str] = "SHM"

    def __init__(
        self, segment: mmap.mmap, *, index: int, ranks: tuple[int, ...], check: Callable[[], None], timeout_s: float
    ) -> None:
        self.device = torch.device("cpu")
        self.index = index
        self.ranks = ranks
        self._segment = segment
        self._check = check
        self._timeout_s = timeout_s
        num_ranks = len(ranks)
        slot_bytes = _slot_bytes(num_ranks)
        num_semaphores = Barrier.num_semaphores(num_ranks)
        # The leader initialises them before any rank learns that the segment is ready; see select.py.
        self._semaphores = Semaphores(segment, 0, num_semaphores, create=index == 0)
        self._barrier = Barrier(self._semaphores, 0, index, num_ranks)
        # torch.frombuffer does not keep the mapping alive; this object does, and outlives its tensors.
        memory = torch.frombuffer(segment, dtype=torch.uint8)
        tables_start = _tables_start(num_ranks)
        tables_bytes = 2 * num_ranks * num_ranks * 8
        #: (2 turns, ranks, ranks): how many bytes each rank sends to each rank.
        self._tables = (
            memory[tables_start : tables_start + tables_bytes].view(torch.int64).view(2, num_ranks, num_ranks)
        )
        #: (ranks + 1, 2 turns, bytes); the last row holds results.
        self._slots = memory[_control_bytes(num_ranks) :].view(num_ranks + 1, 2, slot_bytes)
        self._typed: dict[torch.dtype, torch.Tensor] = {torch.uint8: self._slots}
        self._turn = 0
        self._table_turn = 0
        self._deadline_s = 0.0

    def reduces(self, dtype: torch.dtype) -> bool:
        return True

    def allreduce(self, buffer: torch.Tensor, op: ReduceOp) -> Work:
        reduce = _REDUCE[op]
        slots = self._slots_of(buffer.dtype)
        for chunk, turn in self._chunks(buffer, slots.shape[2]):
            length = chunk.numel()
            slots[self.index, turn, :length].copy_(chunk)
            self._meet()
            if self.num_ranks == 2:
                # Both ranks reduce all of it, straight into their own tensor: the operations commute exactly.
                reduce(slots[0, turn, :length], slots[1, turn, :length], out=chunk)
            else:
                self._reduce_part(reduce, slots[:, turn, :length])
                self._meet()
                chunk.copy_(slots[-1, turn, :length])
        return Finished()

    def reduce_directly(
        self,
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
        op: ReduceOp,
        *,
        prescale: float,
        postscale: float,
        divisor: int,
    ) -> bool:
        reduce = _REDUCE[op]
        slots = self._slots_of(inputs[0].dtype)
        if divisor > 1 and _halves_exactly(slots.dtype, divisor):
            # The division joins the copy into the slot. Only a power of two gives the same bits as dividing the sum.
            prescale, divisor = prescale / divisor, 1
        pairs = [(flat(i), flat(o)) for i, o in zip(inputs, outputs, strict=True) if i.numel()]
        for pieces in _filled_slots(pairs, slots.shape[2]):
            turn = self._next_turn()
            length = pieces[-1].place.stop
            for piece in pieces:
                copy_scaled(slots[self.index, turn, piece.place], piece.source, prescale)
            self._meet()
            if self.num_ranks == 2:
                # Both ranks reduce all of it, straight into their own tensors: the operations commute exactly.
                for piece in pieces:
                    reduce(slots[0, turn, piece.place], slots[1, turn, piece.place], out=piece.target)
                    finish_scaled(piece.target, piece.target, postscale, divisor)
                continue
            part = self._reduce_part(reduce, slots[:, turn, :length])
            finish_scaled(part, part, postscale, divisor)
            self._meet()
            for piece in pieces:
                piece.target.copy_(slots[-1, turn, piece.place])
        return True

    def allgather(self, output: torch.Tensor, buffer: torch.Tensor) -> Work:
        parts = output.view(self.num_ranks, -1)
        start = 0
        for chunk, turn in self._chunks(buffer, self._slots.shape[2]):
            length = chunk.numel()
            self._slots[self.index, turn, :length].copy_(chunk)
            self._meet()
            parts[:, start : start + length].copy_(self._slots[:-1, turn, :length])
            start += length
        return Finished()

    def broadcast(self, buffer: torch.Tensor, root_index: int) -> Work:
        for chunk, turn in self._chunks(buffer, self._slots.shape[2]):
            slot = self._slots[root_index, turn, : chunk.numel()]
            if self.index == root_index:
                slot.copy_(chunk)
            self._meet()
            if self.index != root_index:
                chunk.copy_(slot)
        return Finished()

    def alltoall(
        self, output: torch.Tensor, buffer: torch.Tensor, output_bytes: list[int], input_bytes: list[int]
    ) -> Work:
        self._table_turn ^= 1
        table = self._tables[self._table_turn]
        table[self.index] = torch.tensor(input_bytes, device="cpu")
        self._meet()
        # Sender s has the bytes for this rank at [starts[s], starts[s] + output_bytes[s]) of its buffer.
        starts = table[:, : self.index].sum(dim=1).tolist()
        targets = [sum(output_bytes[:sender]) for sender in range(self.num_ranks)]
        longest = int(table.sum(dim=1).max())
        slot_bytes = self._slots.shape[2]
        for first in range(0, longest, slot_bytes):
            turn = self._next_turn()
            chunk = buffer[first : first + slot_bytes]
            self._slots[self.index, turn, : chunk.numel()].copy_(chunk)
            self._meet()
            for sender, (start, length) in enumerate(zip(starts, output_bytes, strict=True)):
                begin, end = max(start, first), min(start + length, first + slot_bytes)
                if begin < end:
                    target = targets[sender] + begin - start
                    output[target : target + end - begin] = self._slots[sender, turn, begin - first : end - first]
        return Finished()

    def barrier(self) -> Work:
        self._meet()
        return Finished()

    def abort(self) -> None:
        """Nothing is under way: collectives run in the thread that would call this."""

    def close(self) -> None:
        self._typed.clear()
        del self._slots, self._tables
        self._semaphores.release()
        # The mapping itself goes with its last reference; closing it under a tensor that is left would be fatal.

    def _reduce_part(self, reduce: Callable[..., Any], slots: torch.Tensor) -> torch.Tensor:
        """Reduce this rank's share of a chunk, and return it. ``slots`` has the shape (ranks + 1, elements)."""
        length = slots.shape[1]
        # Shares begin at multiples of 16 elements, so that no two ranks write one cache line.
        share = -(-length // self.num_ranks)
        share = -(-share // 16) * 16
        part = slice(min(self.index * share, length), min((self.index + 1) * share, length))
        result = slots[-1, part]
        reduce(slots[0, part], slots[1, part], out=result)
        for index in range(2, self.num_ranks):
            reduce(result, slots[index, part], out=result)
        return result

    def _chunks(self, buffer: torch.Tensor, most: int) -> Iterator[tuple[torch.Tensor, int]]:
        """``buffer`` in pieces of at most ``most`` elements, each with the turn whose slots it uses."""
        for start in range(0, buffer.numel(), most):
            yield buffer[start : start + most], self._next_turn()

    def _next_turn(self) -> int:
        self._turn ^= 1
        return self._turn

    def _slots_of(self, dtype: torch.dtype) -> torch.Tensor:
        """The slots as elements of ``dtype``: (ranks + 1, 2, elements)."""
        if dtype not in self._typed:
            self._typed[dtype] = self._slots.view(dtype)
        return self._typed[dtype]

    def _meet(self) -> None:
        # A long collective may take as long as it makes progress.
        self._deadline_s = time.monotonic() + self._timeout_s
        self._barrier.wait(self._look, _CHECK_PERIOD_S)

    def _look(self) -> None:
        self._check()
        if time.monotonic() > self._deadline_s:
            raise RuntimeError(
                f"the other ranks of this host did not come to a collective within {self._timeout_s:g} s: one of them "
                "is stopped or overloaded. HOROVOD_GLOO_TIMEOUT_SECONDS sets how long to wait"
            )


@dataclass(frozen=True)
class _Piece:
    """A run of elements that passes through a slot in one turn."""

    source: torch.Tensor
    target: torch.Tensor
    #: Where it stands in the slot.
    place: slice


def _filled_slots(pairs: list[tuple[torch.Tensor, torch.Tensor]], capacity: int) -> Iterator[list[_Piece]]:
    """Deal flat (source, target) pairs into slots of ``capacity`` elements; long tensors pass in several turns."""
    pieces: list[_Piece] = []
    filled = 0
    for source, target in pairs:
        start = 0
        while start < source.numel():
            length = min(source.numel() - start, capacity - filled)
            run = slice(start, start + length)
            pieces.append(_Piece(source[run], target[run], slice(filled, filled + length)))
            start += length
            # Tensors begin at multiples of 16 elements, so that vectorised loops stay aligned.
            filled = -(-(filled + length) // 16) * 16
            if filled >= capacity:
                yield pieces
                pieces, filled = [], 0
    if pieces:
        yield pieces


def _halves_exactly(dtype: torch.dtype, divisor: int) -> bool:
    return dtype in (torch.float32, torch.float64) and divisor & (divisor - 1) == 0


def _slot_bytes(num_ranks: int) -> int:
    return max(_PAGE_BYTES, min(_SLOT_BYTES, _MOST_BYTES // (2 * (num_ranks + 1)) // _PAGE_BYTES * _PAGE_BYTES))


def _tables_start(num_ranks: int) -> int:
    return Barrier.num_semaphores(num_ranks) * STRIDE_BYTES


def _control_bytes(num_ranks: int) -> int:
    """Semaphores and tables, up to the next page."""
    num_bytes = _tables_start(num_ranks) + 2 * num_ranks * num_ranks * 8
    return -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES
