"""Blocks of a plan -> Arrow tables, for a function that makes tensors.

They hold the rows that the rank takes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hvd_cluster.data.columns.arrow_values import nested
from hvd_cluster.data.dataset import Split
from hvd_cluster.data.optional import load_pyarrow
from hvd_cluster.data.reading.block_buffer import BlockChunk, TableBuffer
from hvd_cluster.data.reading.row_form import TableRows
from hvd_cluster.data.reading.row_group_reader import RowGroupReader
from hvd_cluster.data.reading.shards import Block, RowRange
from hvd_cluster.data.schema import Schema
from hvd_cluster.data.tables.parquet import ARROW_SUFFIX

if TYPE_CHECKING:
    import pyarrow as pa

#: The column that says where in the data a row is: number of its row group in the split, and its row in that.
_PLACE = "__hvd_cluster_place__"
_ROW_BITS = 32


class RawBlockReader:
    """Reads blocks as tables. Several threads may use it at once."""

    def __init__(self, split: Split, reader: RowGroupReader, schema: Schema) -> None:
        self._reader = reader
        self.schema = schema
        self.form = TableRows()
        self._groups = split.row_groups
        self._numbers = {(group.path, group.index, group.start): i for i, group in enumerate(split.row_groups)}

    def buffer(self, block: Block, num_chunks: int) -> TableBuffer:
        """What a block is put together in."""
        return TableBuffer(block, num_chunks)

    def read(self, buffer: TableBuffer, chunk: BlockChunk, stopped: Callable[[], bool]) -> None:
        """Read a chunk of a block, and put the rows that the rank takes into the buffer."""
        files = [list(run) for _, run in itertools.groupby(chunk.ranges, key=lambda piece: piece.row_group.path)]
        tables = [self._reader.table(pieces) for pieces in files]
        table = tables[0] if len(tables) == 1 else load_pyarrow().concat_tables(tables)
        table = self._with_places(table, chunk.ranges)
        rows, positions = buffer.taken(chunk)
        buffer.put(positions, table if len(rows) == len(table) else table.take(rows))

    def samples(self, rows: int) -> Iterator[pa.Table]:
        """All rows, at most this many at a time.

        The first ones of each row group come first, and then the others.
        """
        for group in self._groups:
            yield self._piece(RowRange(group, 0, min(rows, group.rows)))
        for group in self._groups:
            start = rows
            while start < group.rows:  # each read as long as all before it: a read may decode the whole row group
                table = self._piece(RowRange(group, start, min(2 * start, group.rows)))
                for first in range(0, len(table), rows):
                    yield table.slice(first, rows)
                start *= 2

    def _piece(self, piece: RowRange) -> pa.Table:
        return self._with_places(self._reader.table([piece]), [piece])

    def _with_places(self, table: pa.Table, pieces: Sequence[RowRange]) -> pa.Table:
        """What was read of some ranges, with the column that says where each row is from."""
        for column in self.schema:
            index = table.column_names.index(column.name)
            table = table.set_column(index, column.name, nested(table.column(index), column.shape))
        places = np.concatenate([self._places(piece) for piece in pieces])
        return table.append_column(_PLACE, load_pyarrow().array(places))

    def place(self, table: pa.Table, row: int) -> str:
        """Where in the data a row of a table is, for messages."""
        group, number = divmod(table.column(_PLACE)[row].as_py(), 1 << _ROW_BITS)
        found = self._groups[group]
        # Files of that suffix are temporary ones of this package.
        return f"row {number} of the data" if found.path.endswith(ARROW_SUFFIX) else found.place_of(number)

    def _places(self, piece: RowRange) -> npt.NDArray[np.int64]:
        group = piece.row_group
        first = (self._numbers[group.path, group.index, group.start] << _ROW_BITS) + group.start + piece.start
        return np.arange(first, first + piece.rows, dtype=np.int64)
