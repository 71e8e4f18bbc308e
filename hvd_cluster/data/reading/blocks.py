"""Blocks of a plan -> tensors, read chunk by chunk of a window.

The rows that the rank takes are picked, ordered and transformed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from hvd_cluster.data.columns.column_config import ColumnConfig
from hvd_cluster.data.dataset import Split
from hvd_cluster.data.reading import decoding, row_transform
from hvd_cluster.data.reading.block_buffer import BlockChunk, TensorBuffer
from hvd_cluster.data.reading.row_form import TensorRows
from hvd_cluster.data.reading.row_group_reader import RowGroupReader
from hvd_cluster.data.reading.row_transform import RowTransform
from hvd_cluster.data.reading.shards import Block, RowRange
from hvd_cluster.data.schema import Schema


class BlockReader:
    """Reads blocks. Several threads may use it at once, once :attr:`schema` is known."""

    def __init__(
        self,
        split: Split,
        reader: RowGroupReader,
        schema: Schema,
        rules: ColumnConfig,
        transform: RowTransform | None = None,
    ) -> None:
        self._split = split
        self._reader = reader
        self._input = schema
        self._rules, self._decode = rules, rules.decode
        self._transform = transform
        if transform is None and not self._decode:
            rules.stacked(schema)  # raises now what could be found later only

    @functools.cached_property
    def schema(self) -> Schema:
        """The columns of the batches.

        What functions make is learned from the split's first row.
        """
        return self._rules.stacked(self._made)

    @functools.cached_property
    def _made(self) -> Schema:
        """Before columns are stacked."""
        if self._transform is None and not self._decode:
            return self._input
        first = RowRange(self._split.row_groups[0], 0, 1)
        place = first.row_group.place
        if self._transform is not None:
            table = self._reader.table([first]).take([0])  # a copy: the function may write to it
            _, output = row_transform.apply(self._transform, table, self._input, None, place, decode=self._decode)
            return output
        values = self._reader.columns([first])
        columns = [
            decoding.first_column(column.name, self._decode[column.name], values[column.name], f"row 0 of {place}")
            if column.name in self._decode
            else column
            for column in self._input
        ]
        return Schema(tuple(columns))

    @functools.cached_property
    def form(self) -> TensorRows:
        """The form of the rows."""
        return TensorRows(self.schema)

    def buffer(self, block: Block, num_chunks: int) -> TensorBuffer:
        """What a block is put together in."""
        return TensorBuffer(block, num_chunks, self._rules.stack)

    def read(self, buffer: TensorBuffer, chunk: BlockChunk, stopped: Callable[[], bool]) -> None:
        """Read a chunk of a block, and put the rows that the rank takes into the buffer.

        Args:
            buffer: the block; its tensors share memory with nothing else.
            chunk: which part of its window.
            stopped: asked now and then; when true, the rest may be left out.
        """
        if self._transform is not None:
            self._put_transformed(buffer, chunk, self._transform, stopped)
            return
        if buffer.num_chunks == 1 and not self._decode:
            self._put_whole(buffer, chunk)
            return
        columns = self._reader.columns(chunk.ranges)
        rows, positions = buffer.taken(chunk)

        def place(index: int) -> str:
            return chunk.place(int(rows[index]))

        for name in self._input.names:
            values = columns.pop(name)  # so that its memory goes once it has been put
            if name in self._decode:
                picked = values if len(rows) == chunk.rows else values.take(rows)
                values = decoding.decoded(self._made[name], self._decode[name], picked, place, stopped)
            elif len(rows) < chunk.rows:
                values = values.index_select(0, torch.from_numpy(rows))
            buffer.put(chunk, positions, name, values)

    def _put_whole(self, buffer: TensorBuffer, chunk: BlockChunk) -> None:
        """Fill a block of one chunk: gather its rows in order, or take them as is."""
        block, stacked = buffer.block, {name for names in self._rules.stack.values() for name in names}
        is_in_order = block.seeds is None and block.stride == 1
        shared = is_in_order and self._reader.shares_memory(chunk.ranges)
        rows = slice(block.offset, block.offset + block.rows) if is_in_order else slice(None)
        for name, values in self._reader.columns(chunk.ranges, None if is_in_order else block.order()).items():
            if name in stacked:
                buffer.put(chunk, slice(None), name, values[rows])
            else:
                buffer.tensors[name] = values[rows].clone() if shared else values[rows]

    def _put_transformed(
        self, buffer: TensorBuffer, chunk: BlockChunk, transform: RowTransform, stopped: Callable[[], bool]
    ) -> None:
        """Fill a block through the user's function.

        It sees the rows that this rank takes and no others.
        """
        rows, positions = buffer.taken(chunk)
        begin = 0
        for piece in chunk.ranges:
            if stopped():
                return
            inside = (rows >= begin) & (rows < begin + piece.rows)
            if inside.any():
                kept = rows[inside] - begin
                table = self._reader.table([piece]).take(kept)
                numbers = (kept + piece.row_group.start + piece.start).tolist()
                place = piece.row_group.place
                part, _ = row_transform.apply(
                    transform, table, self._input, self._made, place, numbers, stopped, self._decode
                )
                if stopped():
                    return
                for name, values in part.items():
                    buffer.put(chunk, positions[inside], name, values)
            begin += piece.rows
