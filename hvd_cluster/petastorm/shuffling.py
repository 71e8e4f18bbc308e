"""Chunks of rows cut into batches: in their order, or drawn from a buffer."""

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
        random: draws the rows.
    """
    waiting: list[RowBatch] = []
    rows, needed = 0, max(capacity, batch_size)
    for chunk in chunks:
        waiting.append(chunk)
        rows += chunk.rows
        if rows >= needed:
            # All batches that this chunk makes possible in one draw: the same as one after the other, and faster.
            count = ((rows - needed) // batch_size + 1) * batch_size
            taken_rows, rest = _cut(joined(waiting), count, random if capacity else None)
            yield from _split(taken_rows, batch_size)
            waiting, rows = [rest] if rest.rows else [], rest.rows
    if rows:
        yield from _split(_cut(joined(waiting), rows, random if capacity else None)[0], batch_size)


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


def _cut(whole: RowBatch, count: int, random: np.random.Generator | None) -> tuple[RowBatch, RowBatch]:
    """Some rows, the first ones or drawn at random, and the rest.

    A draw changes the memory of ``whole``.
    """
    rest = whole.rows - count
    if random is None:
        return _slice(whole, 0, count), _slice(whole, count, whole.rows)
    picked = random.choice(whole.rows, count, replace=False)
    answer = taken(whole, picked)
    # Rows of the tail that were not drawn move to the places of drawn ones before it.
    holes = np.sort(picked[picked < rest])
    tail = np.setdiff1d(np.arange(rest, whole.rows), picked, assume_unique=True)
    for values in whole.columns.values():
        if not isinstance(values, list):
            values[holes] = values[tail]
        else:
            for hole, place in zip(holes.tolist(), tail.tolist(), strict=True):
                values[hole] = values[place]
    return answer, _slice(whole, 0, rest)


def taken(chunk: RowBatch, rows: Any) -> RowBatch:
    """Some rows, in an order given by their numbers."""
    columns: dict[str, Any] = {
        name: [values[row] for row in rows.tolist()] if isinstance(values, list) else values[rows]
        for name, values in chunk.columns.items()
    }
    return RowBatch(columns, len(rows))


def joined(chunks: Sequence[RowBatch]) -> RowBatch:
    """Rows of several chunks, one after the other."""
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
            raise DataError(f"field {name!r} holds different kinds of values in its row groups: {error}") from error
    # Rows of unequal shapes, or with None in some row groups only: one by one.
    rows = (part.cpu().numpy() if isinstance(part, torch.Tensor) else part for part in parts)
    return [value for part in rows for value in part]


def _slice(chunk: RowBatch, start: int, stop: int) -> RowBatch:
    if start == 0 and stop == chunk.rows:
        return chunk
    return RowBatch({name: values[start:stop] for name, values in chunk.columns.items()}, stop - start)
