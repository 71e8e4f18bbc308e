"""Row ranges of files -> tensors, one for each column."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hvd_cluster.data.columns.arrays import stores_as_is
from hvd_cluster.data.columns.column_config import ColumnConfig
from hvd_cluster.data.optional import load_pyarrow
from hvd_cluster.data.reading.row_form import Batch
from hvd_cluster.data.reading.row_groups import RowGroupTables
from hvd_cluster.data.reading.shards import RowRange
from hvd_cluster.data.reading.tensors import to_tensor
from hvd_cluster.data.schema import Column, Schema
from hvd_cluster.errors import DataError

#: What :meth:`RowGroupReader.columns` reads: tensors, and Arrow data of columns that have to be decoded.
Columns = dict[str, Any]


class RowGroupReader:
    """Reads the columns of a schema. Several threads may use it at once."""

    def __init__(self, tables: RowGroupTables, schema: Schema, rules: ColumnConfig) -> None:
        self._tables = tables
        self._schema = schema
        self._rules = rules

    def columns(self, ranges: Sequence[RowRange], order: npt.NDArray[np.int64] | None = None) -> Columns:
        """The rows of ranges, one after the other.

        Args:
            ranges: what to read.
            order: indices into all of these rows: which ones are wanted, and in which order; None for all as they are.
                Not for columns that have to be decoded.

        Returns:
            Column name -> tensor of shape (rows, *column.shape), or ``pyarrow.ChunkedArray`` of n rows for a column
            that has to be decoded. Without an order do not write to the tensors where :meth:`shares_memory` says
            so.
        """
        runs: list[Columns] = []
        places: list[RowRange] = []
        files = [list(run) for _, run in itertools.groupby(ranges, key=lambda piece: piece.row_group.path)]
        gather = None if order is None else _Gather(order)
        for pieces in files:
            try:
                runs.append(self._run(pieces, gather if len(files) == 1 else None))
            except DataError:
                if len(pieces) > 1:
                    for piece in pieces:  # to name the one that is at fault
                        self._run([piece])
                raise
            places.append(pieces[0])
        joined = {name: _joined([run.pop(name) for run in runs], name, places) for name in self._schema.names}
        if gather is not None and len(files) > 1:
            return {name: gather.of_tensor(joined.pop(name)) for name in self._schema.names}
        return joined

    def table(self, pieces: Sequence[RowRange]) -> Any:
        """The rows of ranges of one file as an Arrow table, prepared as the rules say."""
        table = self._tables.read(pieces).combine_chunks()
        for index, column in enumerate(self._schema):
            table = table.set_column(index, column.name, self._prepared(table.column(index), column))
        return table

    def shares_memory(self, ranges: Sequence[RowRange]) -> bool:
        """Whether tensors of these ranges may be memory that others read too."""
        return any(self._tables.shares_memory(piece.row_group.path) for piece in ranges)

    def _run(self, pieces: Sequence[RowRange], gather: _Gather | None = None) -> Columns:
        """The rows of ranges of one file."""
        table = self._tables.read(pieces)
        arrays = dict(zip(table.column_names, table.columns, strict=True))
        del table  # so that the memory of a column goes, or serves the next one, once its rows have been taken
        found: Batch = {}
        problems = []
        for column in self._schema:
            try:
                array = arrays.pop(column.name)
                if gather is not None and (taken := gather.of_numbers(array, column)) is not None:
                    found[column.name] = taken
                    continue
                array = _in_one_chunk(array)
                array = self._prepared(array, column)
                if column.name in self._rules.decode:
                    found[column.name] = array
                    continue
                # Shared memory is not written to: see `shares_memory`.
                tensor = to_tensor(array, column, share_memory=True)
                found[column.name] = tensor if gather is None else gather.of_tensor(tensor)
            except DataError as error:
                problems.append(str(error))
        if problems:
            raise DataError("\n".join([f"in {pieces[0].row_group.place}:", *problems]))
        return found

    def _prepared(self, array: Any, column: Column) -> Any:
        rules = self._rules
        if not any(column.name in rule for rule in (rules.fill_nulls, rules.pad, rules.shapes)):
            return array
        pyarrow = load_pyarrow()
        chunks = [self._rules.prepared(chunk, column) for chunk in array.chunks]
        return pyarrow.chunked_array(chunks) if chunks else array


class _Gather:
    """Takes rows in an order."""

    def __init__(self, order: npt.NDArray[np.int64]) -> None:
        self._order = order

    def of_numbers(self, array: Any, column: Column) -> torch.Tensor | None:
        """The rows of a column of numbers that are stored as they are wanted.

        None where there is more to do. Arrow's indices of 32 bits, and its memory, which serves the next column again,
        make it half the time of putting chunks together and `index_select`.
        """
        if column.shape or array.null_count or len(array) >= 1 << 32 or not stores_as_is(array.type, column):
            return None
        taken = load_pyarrow("pyarrow.compute").take(array, self._indices, boundscheck=False)
        return to_tensor(taken, column, share_memory=True)

    def of_tensor(self, values: torch.Tensor) -> torch.Tensor:
        """The rows of a tensor of shape (n, ...)."""
        return values.index_select(0, torch.from_numpy(self._order))

    @functools.cached_property
    def _indices(self) -> Any:
        return load_pyarrow().array(self._order.astype(np.uint32))


def _in_one_chunk(array: Any) -> Any:
    """A column in one chunk, so that what follows is one operation.

    One that is in one chunk stays the same memory, and bytes that one chunk cannot hold stay in several: a table does
    that, a chunked array alone copies in any case.
    """
    return load_pyarrow().table([array], [""]).combine_chunks().column(0)


def _joined(parts: Sequence[Any], name: str, places: Sequence[RowRange]) -> Any:
    """The rows of several files one after the other."""
    if len(parts) == 1:
        return parts[0]
    if not isinstance(parts[0], torch.Tensor):
        return load_pyarrow().chunked_array([chunk for part in parts for chunk in part.chunks])
    shapes = [tuple(tensor.shape[1:]) for tensor in parts]
    for shape, piece in zip(shapes, places, strict=True):
        if shape != shapes[0]:
            first, other = places[0].row_group.place, piece.row_group.place
            raise DataError(f"column {name!r} has rows of shape {shape} in {other}, but {shapes[0]} in {first}")
    return torch.cat(list(parts))
