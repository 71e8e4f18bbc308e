"""Row ranges of Parquet files -> Arrow tables and tensors; what cannot be read is named by file and row group."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from hvd_cluster.data.batches import to_tensor
from hvd_cluster.data.optional import load_pyarrow
from hvd_cluster.data.schema import Schema
from hvd_cluster.data.shards import RowRange
from hvd_cluster.data.store import Store
from hvd_cluster.data.weave import Batch
from hvd_cluster.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa


class RowGroupReader:
    """Reads the columns of a schema. Several threads may use it at once; it remembers the files' footers.

    Args:
        store: serves the paths.
        schema: the columns to read.
    """

    def __init__(self, store: Store, schema: Schema) -> None:
        self._store = store
        self._schema = schema
        self._footers: dict[str, Any] = {}

    def tensors(self, ranges: Sequence[RowRange]) -> Batch:
        """The rows of ranges, one after the other.

        Returns:
            Column name -> tensor of shape (rows, *column.shape), of memory that nobody else holds.

        Raises:
            DataError: a range cannot be read, or is not what the schema says.
        """
        runs: list[Batch] = []
        places: list[RowRange] = []
        for _, run in itertools.groupby(ranges, key=lambda piece: piece.row_group.path):
            pieces = list(run)
            try:
                runs.append(self._run_tensors(pieces))
            except DataError:
                if len(pieces) > 1:
                    for piece in pieces:  # to name the one that is at fault
                        self._run_tensors([piece])
                raise
            places.append(pieces[0])
        return {name: _joined([run.pop(name) for run in runs], name, places) for name in self._schema.names}

    def table(self, piece: RowRange) -> pa.Table:
        """The rows of one range as an Arrow table.

        Raises:
            DataError: it cannot be read.
        """
        return self._read([piece])

    def _run_tensors(self, pieces: Sequence[RowRange]) -> Batch:
        # One chunk per column, so that what follows is one operation per column, not one per row group.
        table = self._read(pieces).combine_chunks()
        tensors: Batch = {}
        problems = []
        for column in self._schema:
            try:
                # The table is ours alone and is dropped right after.
                tensors[column.name] = to_tensor(table.column(column.name), column, share_memory=True)
            except DataError as error:
                problems.append(str(error))
        if problems:
            raise DataError("\n".join([f"in {place_of(pieces[0])}:", *problems]))
        return tensors

    def _read(self, pieces: Sequence[RowRange]) -> Any:
        """The rows of ranges of one file."""
        parquet, pyarrow = load_pyarrow("pyarrow.parquet"), load_pyarrow()
        path = pieces[0].row_group.path
        # Two pieces of one row group may follow each other: it is read once.
        indices = [index for index, _ in itertools.groupby(piece.row_group.index for piece in pieces)]
        try:
            # No threads of Arrow's own: ours run side by side already, and their number is what the user chose.
            with parquet.ParquetFile(
                path, filesystem=self._store.fs, metadata=self._footers.get(path), pre_buffer=True
            ) as file:
                footer = self._footers[path] = file.metadata
                table = file.read_row_groups(indices, columns=list(self._schema.names), use_threads=False)
                ends = list(itertools.accumulate(footer.row_group(index).num_rows for index in indices))
        except (OSError, ValueError, IndexError, NotImplementedError) as error:
            raise DataError(
                f"cannot read {place_of(pieces[0])}: {error}; the file may be damaged, half-written or removed: write "
                "the data again"
            ) from error
        missing = [name for name in self._schema.names if name not in table.column_names]
        if missing:
            raise DataError(f"{path} lacks the columns {missing}")
        if table.num_rows == sum(piece.rows for piece in pieces):
            return table
        begins = dict(zip(indices, [0, *ends], strict=False))
        slices = [
            table.slice(begins[piece.row_group.index] + piece.row_group.start + piece.start, piece.rows)
            for piece in pieces
        ]
        return pyarrow.concat_tables(slices)


def place_of(piece: RowRange) -> str:
    """Where rows come from, for messages."""
    return f"row group {piece.row_group.index} of {piece.row_group.path}"


def _joined(tensors: Sequence[torch.Tensor], name: str, places: Sequence[RowRange]) -> torch.Tensor:
    """The tensors of several files one after the other."""
    if len(tensors) == 1:
        return tensors[0]
    shapes = [tuple(tensor.shape[1:]) for tensor in tensors]
    for shape, piece in zip(shapes, places, strict=True):
        if shape != shapes[0]:
            first, other = place_of(places[0]), place_of(piece)
            raise DataError(f"column {name!r} has rows of shape {shape} in {other}, but {shapes[0]} in {first}")
    return torch.cat(list(tensors))
