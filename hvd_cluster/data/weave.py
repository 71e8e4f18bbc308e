"""Blocks of rows, which come in the order of first need -> the batches of one rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch

from hvd_cluster.data.schema import Column, Schema
from hvd_cluster.data.shards import ShardPlan

Batch = dict[str, torch.Tensor]


def weave(plan: ShardPlan, take: Callable[[], Batch], schema: Schema) -> Iterator[Batch]:
    """Cut blocks into batches.

    Args:
        plan: the rank's plan.
        take: called once for each of its blocks, in their order, for its rows: name -> tensor of shape
            ``(block.rows, ...)``.
        schema: the columns.

    Yields:
        The batch of each step: views of a block's tensors where its rows lie in one block, else copies.
    """
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
        elif plan.num_slots == 1 and parts[0] is not None:
            yield parts[0]
        else:
            yield {name: _woven(parts, name, start, stop) for name in schema.names}


class _Slot:
    """The rows of one lane that have been read and not yet been taken."""

    def __init__(self) -> None:
        self.end = 0  # the rank's row number that the first row not yet read would have
        self._blocks: deque[tuple[Batch, int]] = deque()  # tensors, and their number of rows
        self._begin = 0  # the first row of the first block that has not been taken

    def add(self, tensors: Batch, rows: int) -> None:
        """Take in a block."""
        self._blocks.append((tensors, rows))

    def cut(self, count: int, names: Sequence[str]) -> Batch:
        """Give out the next ``count`` rows."""
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
        if len(pieces) == 1:
            return pieces[0]
        return {name: torch.cat([piece[name] for piece in pieces]) for name in names}


def _woven(parts: Sequence[Batch | None], name: str, start: int, stop: int) -> torch.Tensor:
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
