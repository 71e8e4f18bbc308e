"""Blocks of a plan -> tensors: reads a window, and picks, orders and transforms the rows that this rank takes of it."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from hvd_cluster.data import decoding, row_transform
from hvd_cluster.data.column_rules import ColumnRules
from hvd_cluster.data.dataset import Split
from hvd_cluster.data.row_group_reader import Columns, RowGroupReader
from hvd_cluster.data.row_groups import place_of
from hvd_cluster.data.row_transform import RowTransform
from hvd_cluster.data.schema import Column, Schema
from hvd_cluster.data.shards import Block, RowRange
from hvd_cluster.data.weave import Batch


class BlockReader:
    """Reads blocks. Several threads may use it at once, once :attr:`schema` is known.

    Args:
        split: what the blocks are pieces of.
        reader: reads the columns of ``schema``.
        schema: the columns as the files hold them.
        rules: which of them are decoded.
        transform: the user's function from row to row.
    """

    def __init__(
        self,
        split: Split,
        reader: RowGroupReader,
        schema: Schema,
        rules: ColumnRules,
        transform: RowTransform | None = None,
    ) -> None:
        self._split = split
        self._reader = reader
        self._input = schema
        self._decode = rules.decode
        self._transform = transform

    @functools.cached_property
    def schema(self) -> Schema:
        """The columns of the blocks; what functions make is learned from the split's first row.

        Raises:
            DataError: the first row cannot be read, decoded or transformed.
        """
        if self._transform is None and not self._decode:
            return self._input
        first = RowRange(self._split.row_groups[0], 0, 1)
        place = place_of(first)
        if self._transform is not None:
            table = self._reader.table(first)
            _, output = row_transform.apply(self._transform, table, self._input, None, place, decode=self._decode)
            return output
        values = self._reader.columns([first])
        return Schema(tuple(self._output_column(column, values, f"row 0 of {place}") for column in self._input))

    def read(self, block: Block, stopped: Callable[[], bool]) -> Batch:
        """The rows of a block in their order.

        Args:
            block: which rows.
            stopped: asked now and then; when true, anything may be returned.

        Returns:
            Column name -> tensor of shape (block.rows, *column.shape), of memory that nobody else holds.

        Raises:
            DataError: they cannot be read, decoded or transformed; the text names file and row group.
        """
        if self._transform is not None:
            return self._transformed(block, self._transform, stopped)
        columns = self._reader.columns(block.ranges)
        if block.seeds is None and block.stride == 1:
            rows = slice(block.offset, block.offset + block.rows)
            shared = self._reader.shares_memory(block.ranges)
            picked = {
                name: values[rows].clone() if shared and isinstance(values, torch.Tensor) else values[rows]
                for name, values in columns.items()
            }
            order = np.arange(rows.start, rows.stop)
        else:
            order = block.order()
            index = torch.from_numpy(order)
            picked = {}
            for name in self._input.names:
                values = columns.pop(name)  # so that its memory goes once it has been ordered
                picked[name] = values.index_select(0, index) if isinstance(values, torch.Tensor) else values.take(order)
        for name, function in self._decode.items():
            place = functools.partial(_place_of_row, block, order)
            picked[name] = decoding.decoded(self.schema[name], function, picked[name], place, stopped)
        return picked

    def _output_column(self, column: Column, values: Columns, where: str) -> Column:
        function = self._decode.get(column.name)
        if function is None:
            return column
        return decoding.first_column(column.name, function, values[column.name], where)

    def _transformed(self, block: Block, transform: RowTransform, stopped: Callable[[], bool]) -> Batch:
        """The same through the user's function, which sees the rows that this rank takes and no others."""
        order = block.order()
        kept = np.sort(order)  # the rows taken, in the order of the window
        parts: list[Batch] = []
        begin = 0
        for piece in block.ranges:
            if stopped():
                return {}
            first, last = np.searchsorted(kept, [begin, begin + piece.rows])
            rows = kept[first:last] - begin
            begin += piece.rows
            if len(rows):
                table = self._reader.table(piece).take(rows)
                numbers = (rows + piece.row_group.start + piece.start).tolist()
                part, _ = row_transform.apply(
                    transform, table, self._input, self.schema, place_of(piece), numbers, stopped, self._decode
                )
                parts.append(part)
        if stopped():
            return {}
        positions = torch.from_numpy(np.searchsorted(kept, order))
        return {
            name: torch.cat([part.pop(name) for part in parts]).index_select(0, positions) for name in self.schema.names
        }


def _place_of_row(block: Block, order: npt.NDArray[np.int64], index: int) -> str:
    """Where the block's row number ``index`` comes from, for messages."""
    row = int(order[index])
    for piece in block.ranges:
        if row < piece.rows:
            break
        row -= piece.rows
    return f"row {row + piece.row_group.start + piece.start} of {place_of(piece)}"
