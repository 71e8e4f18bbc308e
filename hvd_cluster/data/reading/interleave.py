"""Blocks of rows, in the order of first use -> the batches of one rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch

from hvd_cluster.data.reading.shards import ShardPlan
from hvd_cluster.data.schema import Column, Schema

Batch = dict[str, torch.Tensor]

#: Batches whose views are made at once: one call per column for all of them.
_BATCHES_AT_ONCE = 64
#: A batch that is kept holds no more memory than this, or than twice its own size where that is more: batches are views
#: of a block of that size, or of as many rows copied out of a larger one. (With 1 MiB a tenth of the time went into
#: copies.)
SLAB_BYTES = 16 * 1024 * 1024


def interleave(plan: ShardPlan, take: Callable[[], Batch], schema: Schema) -> Iterator[Batch]:
    """Cut blocks into batches.

    Args:
        plan: the rank's plan.
        take: called once for each of its blocks, in their order, for its rows: name -> tensor of shape
            ``(block.rows, ...)``.
        schema: the columns.

    Yields:
        The batch of each step, which holds no more memory than SLAB_BYTES says.
    """
    return _cut(plan, take, schema) if plan.num_slots == 1 else _interleaved(plan, take, schema)


def _cut(plan: ShardPlan, take: Callable[[], Batch], schema: Schema) -> Iterator[Batch]:
    """The batches of one lane: its blocks follow each other."""
    names, batch_size = schema.names, plan.batch_size
    pieces: list[Batch] = []  # of a batch that continues in the next block
    waiting = steps = 0
    for block in plan.blocks:
        tensors = take()
        begin = 0
        row_bytes = sum(tensor[:1].nbytes for tensor in tensors.values())
        own = block.rows * row_bytes <= max(SLAB_BYTES, 2 * batch_size * row_bytes)
        at_once = _BATCHES_AT_ONCE if own else max(1, min(_BATCHES_AT_ONCE, SLAB_BYTES // (batch_size * row_bytes)))
        if waiting:
            begin = min(batch_size - waiting, block.rows)
            pieces.append({name: tensors[name][:begin] for name in names})
            waiting += begin
            if waiting == batch_size:
                yield _joined(pieces, names)
                pieces, waiting, steps = [], 0, steps + 1
        while block.rows - begin >= batch_size:
            count = min(at_once, (block.rows - begin) // batch_size)
            views = [_batches_of(tensors[name], begin, count, batch_size, copied=not own) for name in names]
            for values in zip(*views, strict=True):
                yield dict(zip(names, values, strict=True))
            begin, steps = begin + count * batch_size, steps + count
        if begin < block.rows:
            rest = {name: tensors[name][begin:] for name in names}
            pieces.append(rest if own else {name: rows.clone() for name, rows in rest.items()})
            waiting += block.rows - begin
    if waiting:
        yield _joined(pieces, names)
        steps += 1
    for _ in range(steps, plan.steps):
        yield {column.name: _empty(column) for column in schema}


def _batches_of(
    tensor: torch.Tensor, begin: int, count: int, batch_size: int, *, copied: bool
) -> Sequence[torch.Tensor]:
    """Views of ``count`` batches; one unbind is half the time of as many slices."""
    rows = tensor[begin : begin + count * batch_size]
    rows = rows.clone() if copied else rows
    return rows.view(count, batch_size, *rows.shape[1:]).unbind() if rows.is_contiguous() else rows.split(batch_size)


def _interleaved(plan: ShardPlan, take: Callable[[], Batch], schema: Schema) -> Iterator[Batch]:
    """The batches of several lanes, which give their rows in turn."""
    slots = [_Slot() for _ in range(plan.num_slots)]
    coming = iter(plan.blocks)
    for step in range(plan.steps):
        start = step * plan.batch_size
        stop = start + plan.rows_in(step)
        parts: list[Batch | None] = []
        for slot, buffer in enumerate(slots):
            # Row m belongs to slot m % num_slots.
            rows = range(start + (slot - start) % plan.num_slots, stop, plan.num_slots)
            while rows and buffer.end <= rows[-1]:
                block = next(coming)
                slots[block.slot].add(take(), block.rows)
                slots[block.slot].end = block.first + block.rows * plan.num_slots
            parts.append(buffer.cut(len(rows), schema.names) if rows else None)
        if start == stop:
            yield {column.name: _empty(column) for column in schema}
        else:
            yield {name: _rows_in_turn(parts, name, start, stop) for name in schema.names}


class _Slot:
    """The rows of one lane that have been read and not yet been taken."""

    def __init__(self) -> None:
        self.end = 0  # the rank's row number that the first row not yet read would have
        self._blocks: deque[tuple[Batch, int]] = deque()  # tensors, and their number of rows
        self._begin = 0  # the first row of the first block that has not been taken

    def add(self, tensors: Batch, rows: int) -> None:
        """Append a block."""
        self._blocks.append((tensors, rows))

    def cut(self, count: int, names: Sequence[str]) -> Batch:
        """Remove and return the next ``count`` rows."""
        pieces: list[Batch] = []
        while count:
            tensors, rows = self._blocks[0]
            stop = min(rows, self._begin + count)
            pieces.append({name: tensors[name][self._begin : stop] for name in names})
            count -= stop - self._begin
            self._begin = stop
            if stop == rows:
                self._blocks.popleft()
                self._begin = 0
        return _joined(pieces, names)


def _joined(pieces: Sequence[Batch], names: Sequence[str]) -> Batch:
    if len(pieces) == 1:
        return pieces[0]
    return {name: torch.cat([piece[name] for piece in pieces]) for name in names}


def _rows_in_turn(parts: Sequence[Batch | None], name: str, start: int, stop: int) -> torch.Tensor:
    """Rows of several lanes in turn; row m of the rank comes from lane ``m % len(parts)``."""
    some = next(part[name] for part in parts if part is not None)
    rows = some.new_empty((stop - start, *some.shape[1:]))
    for slot, part in enumerate(parts):
        if part is not None:
            rows[(slot - start) % len(parts) :: len(parts)] = part[name]
    return rows


def _empty(column: Column) -> torch.Tensor:
    shape = (0, *(max(0, length) for length in column.shape))
    return torch.empty(shape, dtype=getattr(torch, column.dtype))
