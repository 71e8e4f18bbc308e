"""Row ranges of files -> tensors, one for each column."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from hvd_cluster.data.columns.column_rules import ColumnRules
from hvd_cluster.data.optional import load_pyarrow
from hvd_cluster.data.reading.batches import to_tensor
from hvd_cluster.data.reading.row_groups import RowGroupTables, place_of
from hvd_cluster.data.reading.shards import RowRange
from hvd_cluster.data.reading.weave import Batch
from hvd_cluster.data.schema import Column, Schema
from hvd_cluster.errors import DataError

#: What :meth:`RowGroupReader.columns` reads: tensors, and Arrow data of columns that have to be decoded.
Columns = dict[str, Any]


class RowGroupReader:
    """Reads the columns of a schema. Several threads may use it at once.

    Args:
        tables: reads the files.
        schema: the columns to read, with their declared shapes.
        rules: how to prepare them.
    """

    def __init__(self, tables: RowGroupTables, schema: Schema, rules: ColumnRules) -> None:
        self._tables = tables
        self._schema = schema
        self._rules = rules

    def columns(self, ranges: Sequence[RowRange]) -> Columns:
        """The rows of ranges, one after the other.

        Returns:
            Column name -> tensor of shape (rows, *column.shape), or ``pyarrow.ChunkedArray`` of n rows for a column
            that has to be decoded. Nobody may write to the tensors where :meth:`shares_memory` says so.

        Raises:
            DataError: a range cannot be read, or is not what the schema says.
        """
        runs: list[Columns] = []
        places: list[RowRange] = []
        for _, run in itertools.groupby(ranges, key=lambda piece: piece.row_group.path):
            pieces = list(run)
            try:
                runs.append(self._run(pieces))
            except DataError:
                if len(pieces) > 1:
                    for piece in pieces:  # to name the one that is at fault
                        self._run([piece])
                raise
            places.append(pieces[0])
        return {name: _joined([run.pop(name) for run in runs], name, places) for name in self._schema.names}

    def table(self, piece: RowRange) -> Any:
        """The rows of one range as an Arrow table, with nulls filled and lists padded.

        Raises:
            DataError: it cannot be read, or a rule does not fit.
        """
        table = self._tables.read([piece]).combine_chunks()
        for index, column in enumerate(self._schema):
            table = table.set_column(index, column.name, self._prepared(table.column(index), column))
        return table

    def shares_memory(self, ranges: Sequence[RowRange]) -> bool:
        """Whether tensors of these ranges may be memory that others read too."""
        return any(self._tables.shares_memory(piece.row_group.path) for piece in ranges)

    def _run(self, pieces: Sequence[RowRange]) -> Columns:
        """The rows of ranges of one file."""
        # One chunk per column, so that what follows is one operation per column, not one per row group.
        table = self._tables.read(pieces).combine_chunks()
        found: Batch = {}
        problems = []
        for column in self._schema:
            try:
                array = self._prepared(table.column(column.name), column)
                if column.name in self._rules.decode:
                    found[column.name] = array
                else:
                    # Whoever shares this memory does not write to it: see `shares_memory`.
                    found[column.name] = to_tensor(array, column, share_memory=True)
            except DataError as error:
                problems.append(str(error))
        if problems:
            raise DataError("\n".join([f"in {place_of(pieces[0])}:", *problems]))
        return found

    def _prepared(self, array: Any, column: Column) -> Any:
        if column.name not in self._rules.fill and column.name not in self._rules.pad:
            return array
        pyarrow = load_pyarrow()
        chunks = [self._rules.prepared(chunk, column) for chunk in array.chunks]
        return pyarrow.chunked_array(chunks) if chunks else array


def _joined(parts: Sequence[Any], name: str, places: Sequence[RowRange]) -> Any:
    """The rows of several files one after the other."""
    if len(parts) == 1:
        return parts[0]
    if not isinstance(parts[0], torch.Tensor):
        return load_pyarrow().chunked_array([chunk for part in parts for chunk in part.chunks])
    shapes = [tuple(tensor.shape[1:]) for tensor in parts]
    for shape, piece in zip(shapes, places, strict=True):
        if shape != shapes[0]:
            first, other = place_of(places[0]), place_of(piece)
            raise DataError(f"column {name!r} has rows of shape {shape} in {other}, but {shapes[0]} in {first}")
    return torch.cat(list(parts))
