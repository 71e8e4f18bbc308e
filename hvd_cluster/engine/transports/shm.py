"""Collectives through memory that the ranks of one host share.

Each rank has a few slots in the segment, used in turn. Tensors pass through them in chunks. A rank fills the slot of
the next chunk before it reduces the previous one, so it rarely waits for the others:

- Two ranks both reduce all of every chunk, straight into their own tensors. One post and one wait for each chunk.
- More ranks reduce a share of every chunk each, into a row of results, from which all copy. One barrier for each chunk.

All ranks compute an element by the same expression of the same operands in the same order, so results are equal to the
last bit. The comments where slots are filled explain why no rank overwrites what another one still reads.
"""

from __future__ import annotations

import math
import mmap
from typing import Any, ClassVar

import torch

from hvd_cluster.engine.shared_memory.arena import Arena
from hvd_cluster.engine.shared_memory.deadline import Check, Deadline
from hvd_cluster.engine.shared_memory.semaphores import Barrier, Semaphores
from hvd_cluster.engine.signature import ReduceOp
from hvd_cluster.engine.transports.chunks import Arithmetic, Chunk, Scratch, chunks_of, scatter, without_aliases
from hvd_cluster.engine.transports.shm_layout import (
    ANNOUNCEMENT_BYTES,
    MAX_ANNOUNCED,
    NUM_TURNS,
    control_bytes,
    piece_bytes,
    segment_bytes,
    slot_bytes,
    tables_start,
)
from hvd_cluster.engine.transports.transport import FinishedWork, Transport, Work

#: This many tries take about 50 us, as long as waking a blocked thread may take.
_MAX_TRIES = 200
_MIN_ANNOUNCED_BYTES = 1 << 17
#: Views of slots that are kept.
_MAX_NARROWED = 1000

#: The slots of one turn: one for each rank, and one for results.
Rows = tuple[torch.Tensor, ...]


class ShmTransport(Transport):
    """Moves tensors through shared memory, in the thread that starts a collective.

    Args:
        memory: :func:`segment_bytes` zero bytes that all ranks share, from ``offset`` on.
        offset: a multiple of the page size.
        index: this rank's index in the process set.
        ranks: the global ranks of the process set, by index.
        check: called now and then while waiting; raises if the world is broken.
        timeout_s: how long a rank waits for the others at each barrier.
        arena: memory for tensors that need not be copied.
        spins: a rank tries for a while before it blocks; False if ranks outnumber cores.
    """

    name: ClassVar[str] = "SHM"
    ends_in_caller: ClassVar[bool] = True

    def __init__(
        self,
        memory: mmap.mmap,
        offset: int = 0,
        *,
        index: int,
        ranks: tuple[int, ...],
        check: Check,
        timeout_s: float,
        arena: Arena | None = None,
        spins: bool = False,
    ) -> None:
        self.device = torch.device("cpu")
        self.index = index
        self.ranks = ranks
        num_ranks = len(ranks)
        self._slot_bytes = slot_bytes(num_ranks)
        num_semaphores = Barrier.num_semaphores(num_ranks)
        # The leader initialises them before any rank learns that the segment is ready; see select.py.
        self._semaphores = Semaphores(
            memory, offset, num_semaphores, create=index == 0, max_tries=_MAX_TRIES if spins else 0
        )
        self._barrier = barrier = Barrier(self._semaphores, 0, index, num_ranks)
        # A collective may take any time as long as it makes progress: each wait in it has its own deadline.
        self._deadline = Deadline(check, timeout_s, lambda: [ranks[index] for index in barrier.late()])
        # torch.frombuffer does not keep the mapping alive; this object does and outlives its tensors.
        self._memory = memory
        part = torch.frombuffer(memory, dtype=torch.uint8, offset=offset, count=segment_bytes(num_ranks))
        first = tables_start(num_ranks)
        tables_bytes = 2 * num_ranks * num_ranks * 8
        #: (2 turns, ranks, ranks): how many bytes each rank sends to each rank.
        self._tables = part[first : first + tables_bytes].view(torch.int64).view(2, num_ranks, num_ranks)
        start = first + tables_bytes
        num_bytes = 2 * num_ranks * ANNOUNCEMENT_BYTES
        #: (2 turns, ranks, words): how many tensors a rank has in the arena, and their offsets.
        self._announcements = part[start : start + num_bytes].view(torch.int64).view(2, num_ranks, -1).numpy()
        self._announcement_turn = 0
        self._arena = arena
        #: (turns, ranks + 1, bytes); the last row of each turn holds results.
        self._slots = part[control_bytes(num_ranks) :].view(NUM_TURNS, num_ranks + 1, self._slot_bytes)
        self._typed: dict[torch.dtype, list[Rows]] = {}
        self._narrowed: dict[tuple[torch.dtype, int, int], Rows] = {}
        self._scratch = Scratch()
        self._spins = spins
        self._is_closed = False
        self._turn = 0
        self._table_turn = 0

    def allreduce(self, buffer: torch.Tensor, op: ReduceOp) -> Work:
        return self.reduce_directly([buffer], [buffer], op, wire=buffer.dtype, prescale=1.0, postscale=1.0, divisor=1)

    def reduce_directly(
        self,
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
        op: ReduceOp,
        *,
        wire: torch.dtype,
        prescale: float,
        postscale: float,
        divisor: int,
    ) -> Work:
        offsets: list[int] = []
        if (
            self._arena is not None
            and prescale == 1.0
            and wire == inputs[0].dtype
            and self._can_reduce_in_place(inputs, outputs)
        ):
            offsets = [self._arena.offset_of(tensor) for tensor in inputs]
            offsets = [] if -1 in offsets else offsets
        arithmetic = Arithmetic.of(op, inputs[0].dtype, wire, prescale, postscale, divisor, self.num_ranks)
        capacity = self._slot_bytes // wire.itemsize
        chunks = chunks_of(inputs, outputs, capacity)
        if not chunks:
            return FinishedWork()
        if offsets or len(chunks) > 1:  # a single chunk is read before anything is written
            apart = without_aliases(inputs, outputs)
            if apart is not inputs:
                chunks, offsets = chunks_of(apart, outputs, capacity), []
        turns = self._rows_of(wire)
        rows, offsets_by_rank = self._begin(arithmetic, chunks, turns, offsets)
        if offsets_by_rank:
            self._reduce_in_place(arithmetic, wire, [tensor.numel() for tensor in inputs], offsets_by_rank)
        elif self.num_ranks == 2:
            self._reduce_in_pairs(arithmetic, chunks, turns, rows)
        else:
            self._reduce_in_shares(arithmetic, chunks, turns, rows)
        return FinishedWork()

    def _can_reduce_in_place(self, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> bool:
        """Whether it is in place, with few tensors to announce, worth a second barrier."""
        return (
            len(inputs) <= MAX_ANNOUNCED
            and sum(tensor.nbytes for tensor in inputs) >= _MIN_ANNOUNCED_BYTES
            and all(tensor is output and tensor.numel() > 0 for tensor, output in zip(inputs, outputs, strict=True))
        )

    def _begin(
        self, arithmetic: Arithmetic, chunks: list[Chunk], turns: list[Rows], offsets: list[int]
    ) -> tuple[Rows, list[list[int]]]:
        """Fill the first chunk's slot and wait for all; returns slots and arena offsets.

        A rank whose tensors are in the arena first announces their offsets and copies nothing. If this is so on all
        ranks, no rank has to copy. If it is so on some ranks only, they copy now, and all ranks wait once more.
        """
        self._announcement_turn ^= 1
        board = self._announcements[self._announcement_turn]
        board[self.index][: 1 + len(offsets)] = [len(offsets), *offsets]
        rows = self._next_rows(turns, chunks[0].length)
        if not offsets:
            arithmetic.fill(rows[self.index], chunks[0].sources)
        self._synchronize()
        announced = [bool(words[0]) for words in board]
        if all(announced):
            return rows, [words[1 : 1 + len(offsets)].tolist() for words in board]
        if any(announced):
            if offsets:
                arithmetic.fill(rows[self.index], chunks[0].sources)
            self._synchronize()
        return rows, []

    def _reduce_in_pairs(self, arithmetic: Arithmetic, chunks: list[Chunk], turns: list[Rows], rows: Rows) -> None:
        """Reduce chunks on both ranks: ops commute exactly. The first is in the slots.

        Chunk c fills the slot that chunk c - 3 or an earlier one has used. By then this rank has waited for the other's
        post of c - 1, which follows the other's reduction of c - 3.

        A rank that can spin reduces a chunk at once, while it is in its cache. A rank that cannot fills the next slot
        first, so that it rarely has to wait for the other one.
        """
        ((to_post, to_await),) = self._barrier.rounds
        post, wait = self._semaphores.post, self._semaphores.wait
        last = chunks[0]
        for chunk in chunks[1:]:
            if self._spins:
                self._reduce_pair(arithmetic, last, rows)
            following = self._next_rows(turns, chunk.length)
            arithmetic.fill(following[self.index], chunk.sources)
            post(to_post)
            if not self._spins:
                self._reduce_pair(arithmetic, last, rows)
            wait(to_await, self._deadline)
            last, rows = chunk, following
        self._reduce_pair(arithmetic, last, rows)

    def _reduce_pair(self, arithmetic: Arithmetic, chunk: Chunk, rows: Rows) -> None:
        is_whole = len(chunk.targets) == 1 and chunk.targets[0].dtype == rows[0].dtype
        result = chunk.targets[0] if is_whole else self._scratch.take(rows[0].dtype, chunk.length)
        arithmetic.combine(rows[:2], result, self._scratch)
        if not is_whole:
            scatter(result, chunk.targets)
        arithmetic.deliver(chunk.targets)

    def _reduce_in_shares(self, arithmetic: Arithmetic, chunks: list[Chunk], turns: list[Rows], rows: Rows) -> None:
        """Reduce a share of each chunk, then copy all; the first chunk is in the slots.

        Step s fills chunk s, reduces the share of s - 1 and copies s - 2 out; then comes a barrier. So what step s
        reduces was filled, and what it copies was reduced, before the last barrier; and the slot that it fills was read
        in step s - 2 or earlier. The last step needs no barrier: the next operation has one before it reduces anything.
        """
        filled = [rows]
        for step in range(1, len(chunks) + 2):
            if step < len(chunks):
                filled.append(self._next_rows(turns, chunks[step].length))
                arithmetic.fill(filled[step][self.index], chunks[step].sources)
            if step <= len(chunks):
                self._reduce_share(arithmetic, filled[step - 1])
            if step >= 2:
                scatter(filled[step - 2][-1], chunks[step - 2].targets)
                arithmetic.deliver(chunks[step - 2].targets)
            if step <= len(chunks):
                self._synchronize()

    def _reduce_in_place(self, arithmetic: Arithmetic, dtype: torch.dtype, counts: list[int], offsets: Any) -> None:
        """Reduce this rank's share of each tensor into the tensors of all ranks."""
        assert self._arena is not None
        size = piece_bytes(self.num_ranks) // dtype.itemsize
        for number, count in enumerate(counts):
            mine = self._share_of(count)
            shares = [self._arena.view(places[number], dtype, count)[mine] for places in offsets]
            for pieces in zip(*(tensor.split(size) for tensor in shares), strict=True):
                arithmetic.combine_in_place(pieces, self._scratch)
                for other in pieces[1:]:
                    other.copy_(pieces[0])
        self._synchronize()

    def _share_of(self, count: int) -> slice:
        """This rank's share of ``count`` elements; possibly empty."""
        # Shares begin at multiples of 16 elements, so that no two ranks write one cache line.
        share = math.ceil(count / self.num_ranks / 16) * 16
        return slice(min(self.index * share, count), min((self.index + 1) * share, count))

    def _reduce_share(self, arithmetic: Arithmetic, rows: Rows) -> None:
        share = self._share_of(rows[0].shape[0])
        if share.start == share.stop:
            return
        *operands, result = [row[share] for row in rows]
        arithmetic.combine(operands, result, self._scratch)

    def allgather(self, output: torch.Tensor, buffer: torch.Tensor) -> Work:
        parts = output.view(self.num_ranks, buffer.numel()).unbind()
        mine = parts[self.index]
        if mine.data_ptr() != buffer.data_ptr():
            mine.copy_(buffer)
        turns = self._rows_of(torch.uint8)
        start = 0
        for chunk in buffer.split(self._slot_bytes):
            rows = self._next_rows(turns, chunk.numel())
            rows[self.index].copy_(chunk)
            self._synchronize()
            for part, row in zip(parts, rows, strict=False):
                if part is not mine:
                    part[start : start + chunk.numel()].copy_(row)
            start += chunk.numel()
        return FinishedWork()

    def reduce_scatter(self, output: torch.Tensor, buffer: torch.Tensor, op: ReduceOp, divisor: int) -> Work | None:
        """As :meth:`_reduce_in_pairs`, but the slot has a piece for each other rank."""
        dtype, num_ranks = buffer.dtype, self.num_ranks
        arithmetic = Arithmetic.of(op, dtype, dtype, 1.0, 1.0, divisor, num_ranks)
        if arithmetic.postscale != 1.0 or arithmetic.last_divisor != 1.0:
            return None
        capacity = self._slot_bytes // dtype.itemsize // num_ranks
        turns = self._rows_of(dtype)
        parts = buffer.view(num_ranks, output.numel()).unbind()
        # Its own part a rank reads from the buffer itself, unless it scales it first or the result takes its place.
        is_copied = arithmetic.prescale != 1.0 or output.data_ptr() == parts[self.index].data_ptr()
        own = None if is_copied else parts[self.index]
        others = [index for index in range(num_ranks) if is_copied or index != self.index]
        previous: tuple[Rows, int, int] | None = None
        for start in range(0, output.numel(), capacity):
            length = min(capacity, output.numel() - start)
            if previous is not None and self._spins:
                self._reduce_piece(arithmetic, *previous, own, output)
            rows = turns[self._next_turn()]
            for other in others:
                place = rows[self.index][other * length : (other + 1) * length]
                arithmetic.fill(place, [parts[other][start : start + length]])
            if previous is not None and not self._spins:
                self._reduce_piece(arithmetic, *previous, own, output)
            self._synchronize()
            previous = (rows, start, length)
        if previous is not None:
            self._reduce_piece(arithmetic, *previous, own, output)
        return FinishedWork()

    def _reduce_piece(
        self,
        arithmetic: Arithmetic,
        rows: Rows,
        start: int,
        length: int,
        own: torch.Tensor | None,
        output: torch.Tensor,
    ) -> None:
        operands = [row[self.index * length : (self.index + 1) * length] for row in rows[:-1]]
        if own is not None:
            operands[self.index] = own[start : start + length]
        arithmetic.combine(operands, output[start : start + length], self._scratch)

    def broadcast(self, buffer: torch.Tensor, root_index: int) -> Work:
        for chunk in buffer.split(self._slot_bytes):
            slot = self._slots[self._next_turn(), root_index, : chunk.numel()]
            if self.index == root_index:
                slot.copy_(chunk)
            self._synchronize()
            if self.index != root_index:
                chunk.copy_(slot)
        return FinishedWork()

    def alltoall(
        self, output: torch.Tensor, buffer: torch.Tensor, output_bytes: list[int], input_bytes: list[int]
    ) -> Work:
        self._table_turn ^= 1
        table = self._tables[self._table_turn]
        table[self.index] = torch.tensor(input_bytes, device="cpu")
        self._synchronize()
        self.require_equal_sizes(output_bytes, table[:, self.index].tolist())
        # Sender s has the bytes for this rank at [starts[s], starts[s] + output_bytes[s]) of its buffer.
        starts = table[:, : self.index].sum(dim=1).tolist()
        targets = [sum(output_bytes[:sender]) for sender in range(self.num_ranks)]
        longest = int(table.sum(dim=1).max())
        for first in range(0, longest, self._slot_bytes):
            slot = self._slots[self._next_turn()]
            chunk = buffer[first : first + self._slot_bytes]
            slot[self.index, : chunk.numel()].copy_(chunk)
            self._synchronize()
            for sender, (start, length) in enumerate(zip(starts, output_bytes, strict=True)):
                begin, end = max(start, first), min(start + length, first + self._slot_bytes)
                if begin < end:
                    target = targets[sender] + begin - start
                    output[target : target + end - begin] = slot[sender, begin - first : end - first]
        return FinishedWork()

    def abort(self) -> None:
        """Nothing is in progress: collectives run in the thread that would call this."""

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._typed.clear()
            self._narrowed.clear()
            # The mapping is closed with its last reference; to close it under a remaining tensor would be fatal.
            del self._slots, self._tables, self._announcements, self._memory
            self._arena = None
            self._semaphores.release()

    def _next_turn(self) -> int:
        # One count for all collectives: each continues with the slots after those of the previous one.
        self._turn = (self._turn + 1) % NUM_TURNS
        return self._turn

    def _rows_of(self, dtype: torch.dtype) -> list[Rows]:
        """For each turn, all ranks' slots and the row of results, as ``dtype`` elements."""
        if dtype not in self._typed:
            self._typed[dtype] = [turn.unbind() for turn in self._slots.view(dtype).unbind()]
        return self._typed[dtype]

    def _next_rows(self, turns: list[Rows], length: int) -> Rows:
        """The first ``length`` elements of the next turn's slots."""
        turn = self._next_turn()
        rows = turns[turn]
        if rows[0].shape[0] == length:
            return rows
        # Slicing takes as long as reducing a small tensor, and the same lengths repeat.
        key = (rows[0].dtype, turn, length)
        narrowed = self._narrowed.get(key)
        if narrowed is None:
            if len(self._narrowed) >= _MAX_NARROWED:
                self._narrowed.clear()
            narrowed = self._narrowed[key] = tuple(row[:length] for row in rows)
        return narrowed

    def _synchronize(self) -> None:
        self._barrier.wait(self._deadline)
