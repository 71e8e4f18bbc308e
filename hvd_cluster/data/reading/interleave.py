"""Blocks of rows, in the order of first use -> the batches of one rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from typing import Generic

from hvd_cluster.data.reading.row_form import R, RowForm
from hvd_cluster.data.reading.shards import ShardPlan

#: Batches whose views are made at once: one call per column for all of them.
_BATCHES_AT_ONCE = 64
#: A batch that is kept holds no more memory than this, or than twice its own size where that is more: batches are views
#: of a block of that size, or of as many rows copied out of a larger one. (With 1 MiB a tenth of the time went into
#: copies.)
SLAB_BYTES = 16 * 1024 * 1024


def interleave(plan: ShardPlan, take: Callable[[], R], form: RowForm[R]) -> Generator[R, None, None]:
    """Cut blocks into batches.

    Args:
        plan: the rank's plan.
        take: called once for each of its blocks, in their order, for its rows.
        form: the form that rows are in.

    Yields:
        The batch of each step, which holds no more memory than SLAB_BYTES says.
    """
    return _cut(plan, take, form) if plan.num_slots == 1 else _interleaved(plan, take, form)


def _cut(plan: ShardPlan, take: Callable[[], R], form: RowForm[R]) -> Generator[R, None, None]:
    """The batches of one lane: its blocks follow each other."""
    batch_size = plan.batch_size
    pieces: list[R] = []  # of a batch that continues in the next block
    waiting = steps = 0
    for block in plan.blocks:
        rows = take()
        begin = 0
        row_bytes = form.row_bytes(rows)
        own = block.rows * row_bytes <= max(SLAB_BYTES, 2 * batch_size * row_bytes)
        at_once = _BATCHES_AT_ONCE if own else max(1, min(_BATCHES_AT_ONCE, SLAB_BYTES // (batch_size * row_bytes)))
        if waiting:
            begin = min(batch_size - waiting, block.rows)
            pieces.append(form.part(rows, 0, begin))
            waiting += begin
            if waiting == batch_size:
                yield form.joined(pieces)
                pieces, waiting, steps = [], 0, steps + 1
        while block.rows - begin >= batch_size:
            count = min(at_once, (block.rows - begin) // batch_size)
            yield from form.batches(rows, begin, count, batch_size, copied=not own)
            begin, steps = begin + count * batch_size, steps + count
        if begin < block.rows:
            rest = form.part(rows, begin, block.rows)
            pieces.append(rest if own else form.copied(rest))
            waiting += block.rows - begin
    if waiting:
        yield form.joined(pieces)
        steps += 1
    for _ in range(steps, plan.steps):
        yield form.empty()


def _interleaved(plan: ShardPlan, take: Callable[[], R], form: RowForm[R]) -> Generator[R, None, None]:
    """The batches of several lanes, which give their rows in turn."""
    slots = [_Slot(form) for _ in range(plan.num_slots)]
    coming = iter(plan.blocks)
    for step in range(plan.steps):
        start = step * plan.batch_size
        stop = start + plan.rows_in(step)
        parts: list[R | None] = []
        for slot, buffer in enumerate(slots):
            # Row m belongs to slot m % num_slots.
            rows = range(start + (slot - start) % plan.num_slots, stop, plan.num_slots)
            while rows and buffer.end <= rows[-1]:
                block = next(coming)
                slots[block.slot].add(take(), block.rows)
                slots[block.slot].end = block.first + block.rows * plan.num_slots
            parts.append(buffer.cut(len(rows)) if rows else None)
        yield form.empty() if start == stop else form.in_turn(parts, start, stop)


class _Slot(Generic[R]):
    """The rows of one lane that have been read and not yet been taken."""

    def __init__(self, form: RowForm[R]) -> None:
        self.end = 0  # the rank's row number that the first row not yet read would have
        self._form = form
        self._blocks: deque[tuple[R, int]] = deque()  # rows of a block, and their number
        self._begin = 0  # the first row of the first block that has not been taken

    def add(self, block: R, rows: int) -> None:
        """Append a block."""
        self._blocks.append((block, rows))

    def cut(self, count: int) -> R:
        """Remove and return the next ``count`` rows."""
        pieces: list[R] = []
        while count:
            block, rows = self._blocks[0]
            stop = min(rows, self._begin + count)
            pieces.append(self._form.part(block, self._begin, stop))
            count -= stop - self._begin
            self._begin = stop
            if stop == rows:
                self._blocks.popleft()
                self._begin = 0
        return self._form.joined(pieces)
