"""How rows are held on their way from blocks to batches.

They are tensors, or Arrow tables for a function to convert.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np
import torch

from hvd_cluster.data.optional import load_pyarrow
from hvd_cluster.data.schema import Column, Schema

if TYPE_CHECKING:
    import pyarrow as pa

Batch = dict[str, torch.Tensor]
#: Rows in one form: a block's, a batch's, or some of either.
R = TypeVar("R")


class RowForm(Protocol[R]):
    """What cutting blocks into batches needs of the form that rows are in."""

    def row_bytes(self, rows: R) -> int:
        """Bytes of one row."""

    def part(self, rows: R, begin: int, stop: int) -> R:
        """Consecutive rows, without a copy."""

    def copied(self, rows: R) -> R:
        """The same rows in memory of their own."""

    def joined(self, pieces: Sequence[R]) -> R:
        """Rows one after the other."""

    def in_turn(self, parts: Sequence[R | None], start: int, stop: int) -> R:
        """Rows of several lanes in turn.

        Row m of the rank comes from lane ``m % len(parts)``.
        """

    def batches(self, rows: R, begin: int, count: int, batch_size: int, *, copied: bool) -> Iterator[R]:
        """``count`` full batches of a block, views of it unless ``copied``."""

    def empty(self) -> R:
        """No rows."""


class TensorRows(RowForm[Batch]):
    """Rows as a tensor for each column, of shape ``(rows, *column.shape)``."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._names = schema.names

    def row_bytes(self, rows: Batch) -> int:
        return sum(tensor[:1].nbytes for tensor in rows.values())

    def part(self, rows: Batch, begin: int, stop: int) -> Batch:
        return {name: rows[name][begin:stop] for name in self._names}

    def copied(self, rows: Batch) -> Batch:
        return {name: tensor.clone() for name, tensor in rows.items()}

    def joined(self, pieces: Sequence[Batch]) -> Batch:
        if len(pieces) == 1:
            return pieces[0]
        return {name: torch.cat([piece[name] for piece in pieces]) for name in self._names}

    def in_turn(self, parts: Sequence[Batch | None], start: int, stop: int) -> Batch:
        return {name: _tensor_in_turn(parts, name, start, stop) for name in self._names}

    def batches(self, rows: Batch, begin: int, count: int, batch_size: int, *, copied: bool) -> Iterator[Batch]:
        views = [_views(rows[name], begin, count, batch_size, copied=copied) for name in self._names]
        for values in zip(*views, strict=True):
            yield dict(zip(self._names, values, strict=True))

    def empty(self) -> Batch:
        return {column.name: _empty(column) for column in self._schema}


class TableRows(RowForm["pa.Table"]):
    """Rows as an Arrow table; no rows are a table without columns."""

    def row_bytes(self, rows: pa.Table) -> int:
        num_bytes: int = rows.nbytes
        return -(-num_bytes // max(1, len(rows)))

    def part(self, rows: pa.Table, begin: int, stop: int) -> pa.Table:
        return rows.slice(begin, stop - begin)

    def copied(self, rows: pa.Table) -> pa.Table:
        return rows.take(np.arange(rows.num_rows))

    def joined(self, pieces: Sequence[pa.Table]) -> pa.Table:
        return pieces[0] if len(pieces) == 1 else load_pyarrow().concat_tables(pieces)

    def in_turn(self, parts: Sequence[pa.Table | None], start: int, stop: int) -> pa.Table:
        places = np.empty(stop - start, dtype=np.int64)
        some = [(slot, part) for slot, part in enumerate(parts) if part is not None]
        begin = 0
        for slot, part in some:
            places[(slot - start) % len(parts) :: len(parts)] = np.arange(begin, begin + part.num_rows)
            begin += part.num_rows
        return self.joined([part for _, part in some]).take(places)

    def batches(self, rows: pa.Table, begin: int, count: int, batch_size: int, *, copied: bool) -> Iterator[pa.Table]:
        whole = self.part(rows, begin, begin + count * batch_size)
        whole = self.copied(whole) if copied else whole
        for number in range(count):
            yield whole.slice(number * batch_size, batch_size)

    def empty(self) -> pa.Table:
        return load_pyarrow().table({})


def _views(tensor: torch.Tensor, begin: int, count: int, batch_size: int, *, copied: bool) -> Sequence[torch.Tensor]:
    """Views of ``count`` batches; one unbind is half the time of as many slices."""
    rows = tensor[begin : begin + count * batch_size]
    rows = rows.clone() if copied else rows
    return rows.view(count, batch_size, *rows.shape[1:]).unbind() if rows.is_contiguous() else rows.split(batch_size)


def _tensor_in_turn(parts: Sequence[Batch | None], name: str, start: int, stop: int) -> torch.Tensor:
    some = next(part[name] for part in parts if part is not None)
    rows = some.new_empty((stop - start, *some.shape[1:]))
    for slot, part in enumerate(parts):
        if part is not None:
            rows[(slot - start) % len(parts) :: len(parts)] = part[name]
    return rows


def _empty(column: Column) -> torch.Tensor:
    shape = (0, *(max(0, length) for length in column.shape))
    return torch.empty(shape, dtype=getattr(torch, column.dtype))
