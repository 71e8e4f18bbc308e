"""Chunks of rows, as they come, cut into batches: in their order, or drawn from a buffer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from hvd_cluster.errors import DataError
from hvd_cluster.petastorm.fragment_reader import RowBatch


def batches(
    chunks: Iterator[RowBatch], batch_size: int, capacity: int, random: np.random.Generator
) -> Iterator[RowBatch]:
    """Batches of ``batch_size`` rows; the last one may have fewer.

    Args:
        chunks: rows; columns may be tensors too.
        batch_size: rows of a batch.
        capacity: rows to draw from; 0 keeps the order. The first batch comes when the buffer holds that many.
        random: draws.
    """
    buffer = _Buffer()
    needed = max(capacity, batch_size)
    for chunk in chunks:
        buffer.add(chunk)
        if buffer.rows >= needed:
            # All batches that this chunk makes possible in one draw: the same as one after the other, and faster.
            count = ((buffer.rows - needed) // batch_size + 1) * batch_size
            yield from _split(buffer.drawn(count, random) if capacity else buffer.cut(count), batch_size)
    if buffer.rows:
        rest = buffer.rows
        yield from _split(buffer.drawn(rest, random) if capacity else buffer.cut(rest), batch_size)


def _split(chunk: RowBatch, batch_size: int) -> Iterator[RowBatch]:
    starts = range(0, chunk.rows, batch_size)
    columns = [
        values.split(batch_size)
        if isinstance(values, torch.Tensor)
        else [values[start : start + batch_size] for start in starts]
        for values in chunk.columns.values()
    ]
    for start, batch in zip(starts, zip(*columns, strict=True), strict=True):
        yield RowBatch(dict(zip(chunk.columns, batch, strict=True)), min(batch_size, chunk.rows - start))


class _Buffer:
    """Rows that wait, as parts."""

    def __init__(self) -> None:
        self.rows = 0
        self._parts: list[RowBatch] = []
        self._start = 0  # rows of the first part that were cut off

    def add(self, chunk: RowBatch) -> None:
        self._parts.append(chunk)
        self.rows += chunk.rows

    def cut(self, count: int) -> RowBatch:
        """The first ``count`` rows."""
        parts: list[RowBatch] = []
        self.rows -= count
        wanted = count
        while wanted:
            part = self._parts[0]
            stop = min(part.rows, self._start + wanted)
            parts.append(_slice(part, self._start, stop))
            wanted -= stop - self._start
            self._start = stop
            if stop == part.rows:
                self._parts.pop(0)
                self._start = 0
        return joined(parts)

    def drawn(self, count: int, random: np.random.Generator) -> RowBatch:
        """``count`` rows drawn from all, each once; the places of the drawn rows are filled with the last ones."""
        whole = joined(
            [_slice(part, self._start if index == 0 else 0, part.rows) for index, part in enumerate(self._parts)]
        )
        picked = random.choice(whole.rows, count, replace=False)
        answer = taken(whole, picked)
        rest = whole.rows - count
        # Rows of the tail that were not drawn move to the places of drawn ones before it.
        holes = np.sort(picked[picked < rest])
        tail = np.setdiff1d(np.arange(rest, whole.rows), picked, assume_unique=True)
        for values in whole.columns.values():
            if not isinstance(values, list):
                values[holes] = values[tail]
            else:
                for hole, place in zip(holes.tolist(), tail.tolist(), strict=True):
                    values[hole] = values[place]
        self._parts = [_slice(whole, 0, rest)] if rest else []
        self._start = 0
        self.rows = rest
        return answer


def taken(chunk: RowBatch, rows: Any) -> RowBatch:
    """Some rows, in an order given by their numbers."""
    columns: dict[str, Any] = {
        name: [values[row] for row in rows.tolist()] if isinstance(values, list) else values[rows]
        for name, values in chunk.columns.items()
    }
    return RowBatch(columns, len(rows))


def joined(chunks: Sequence[RowBatch]) -> RowBatch:
    """Rows of several chunks, one after the other.

    Raises:
        DataError: a column's rows differ in shape or kind.
    """
    if len(chunks) == 1:
        return chunks[0]
    columns = {name: _joined(name, [chunk.columns[name] for chunk in chunks]) for name in chunks[0].columns}
    return RowBatch(columns, sum(chunk.rows for chunk in chunks))


def _joined(name: str, parts: list[Any]) -> Any:
    if all(isinstance(part, torch.Tensor) for part in parts) and len({part.shape[1:] for part in parts}) == 1:
        return torch.cat(parts)
    arrays = [part for part in parts if isinstance(part, np.ndarray)]
    if len(arrays) == len(parts) and len({part.shape[1:] for part in arrays}) == 1:
        try:
            return np.concatenate(arrays)
        except (TypeError, ValueError) as error:
            raise DataError(f"field {name!r} holds different things in different row groups: {error}") from error
    # Rows of unequal shapes, or with None in some row groups only: one by one.
    rows = (part.cpu().numpy() if isinstance(part, torch.Tensor) else part for part in parts)
    return [value for part in rows for value in part]


def _slice(chunk: RowBatch, start: int, stop: int) -> RowBatch:
    if start == 0 and stop == chunk.rows:
        return chunk
    return RowBatch({name: values[start:stop] for name, values in chunk.columns.items()}, stop - start)
