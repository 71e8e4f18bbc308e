"""A block of rows that several threads fill, each from its own row groups."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from hvd_cluster.data.optional import load_pyarrow
from hvd_cluster.data.reading.row_form import Batch
from hvd_cluster.data.reading.shards import Block, RowRange
from hvd_cluster.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class BlockChunk:
    """Consecutive ranges of a block's window that one thread reads in one call."""

    #: What to read.
    ranges: tuple[RowRange, ...]
    #: Index in the window of the first row.
    begin: int

    @property
    def rows(self) -> int:
        """Rows of the window that it holds, whether the rank takes them or not."""
        return sum(piece.rows for piece in self.ranges)

    def place(self, row: int) -> str:
        """Where a row of the chunk comes from, for messages."""
        for piece in self.ranges:
            if row < piece.rows:
                break
            row -= piece.rows
        return piece.row_group.place_of(row + piece.row_group.start + piece.start)


def chunks_of(block: Block, max_bytes: int, row_bytes: int) -> list[BlockChunk]:
    """Cut a block's window into chunks of at most this many bytes.

    A larger range is a chunk of its own.

    Args:
        block: what is cut.
        max_bytes: of a chunk. A range counts as the row group that has to be read for it, or as what its rows take as
            tensors where that is more.
        row_bytes: size of a row in tensors.
    """
    runs: list[list[RowRange]] = []
    room = 0
    for piece in block.ranges:
        size = max(piece.row_group.read_bytes, piece.rows * row_bytes)
        if not runs or size > room:
            runs.append([])
            room = max_bytes
        runs[-1].append(piece)
        room -= size
    chunks, begin = [], 0
    for run in runs:
        chunks.append(BlockChunk(tuple(run), begin))
        begin += chunks[-1].rows
    return chunks


class BlockBuffer:
    """A block, filled chunk by chunk. Several threads may use it at once."""

    def __init__(self, block: Block, num_chunks: int) -> None:
        self.block = block
        self.num_chunks = num_chunks
        self._lock = threading.Lock()
        self._places: npt.NDArray[Any] | None = None
        self._num_untaken = num_chunks

    def taken(self, chunk: BlockChunk) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The rows of a chunk that the rank takes, by their indices.

        The first indices are those in the chunk, ascending; the second are those in the block. Call it once for each
        chunk.
        """
        with self._lock:
            places = self._places_in_block() if self._places is None else self._places
            self._num_untaken -= 1
            # A block that waits does not hold it: it may take more than the rows.
            self._places = places if self._num_untaken else None
        places = places[chunk.begin : chunk.begin + chunk.rows]
        rows = np.flatnonzero(places >= 0)
        return rows, places[rows].astype(np.int64, copy=False)

    def _places_in_block(self) -> npt.NDArray[Any]:
        """The index in the block of each row of the window; -1 if it is not taken."""
        dtype = np.int32 if self.block.window_rows < 1 << 31 else np.int64
        places = np.full(self.block.window_rows, -1, dtype=dtype)
        places[self.block.order()] = np.arange(self.block.rows, dtype=dtype)
        return places


class TensorBuffer(BlockBuffer):
    """The tensors of a block."""

    def __init__(self, block: Block, num_chunks: int, stacks: Mapping[str, Sequence[str]] | None = None) -> None:
        super().__init__(block, num_chunks)
        #: Name -> tensor of shape (block.rows, ...), complete when all chunks have been put.
        self.tensors: Batch = {}
        self._stack_of = {name: (stack, names) for stack, names in (stacks or {}).items() for name in names}

    def put(self, chunk: BlockChunk, positions: npt.NDArray[np.int64] | slice, name: str, values: torch.Tensor) -> None:
        """Put the values of a column where they belong.

        Args:
            chunk: where they come from, for messages.
            positions: the place of each in the block, shape (n,), or a slice of the block.
            name: the column.
            values: shape (n, ...).
        """
        with self._lock:
            if name not in self.tensors:
                self._allocate(name, values)
        target = self.tensors[name]
        if values.shape[1:] != target.shape[1:]:
            raise DataError(
                f"column {name!r} has rows of shape {tuple(values.shape[1:])} in {chunk.ranges[0].row_group.place}, "
                f"but {tuple(target.shape[1:])} elsewhere"
            )
        # NumPy moves whole rows and lets other threads run; torch's index_copy_ goes element by element.
        target.numpy()[positions] = values.numpy()

    def _allocate(self, name: str, like: torch.Tensor) -> None:
        if name not in self._stack_of:
            self.tensors[name] = like.new_empty((self.block.rows, *like.shape[1:]))
            return
        stack, names = self._stack_of[name]
        whole = like.new_empty((self.block.rows, len(names), *like.shape[1:]))
        self.tensors |= {stack: whole, **dict(zip(names, whole.unbind(1), strict=True))}

    def complete(self, names: Sequence[str]) -> Batch:
        """The finished tensors, in the order of the names."""
        return {name: self.tensors[name] for name in names}


class TableBuffer(BlockBuffer):
    """The rows of a block as an Arrow table."""

    def __init__(self, block: Block, num_chunks: int) -> None:
        super().__init__(block, num_chunks)
        self._parts: list[tuple[npt.NDArray[np.int64], pa.Table]] = []
        self._table: pa.Table | None = None

    def put(self, positions: npt.NDArray[np.int64], table: pa.Table) -> None:
        """Add the rows of a chunk; the last call brings all rows into order.

        The order is that of the block.

        Args:
            positions: the place of each row in the block, shape (n,).
            table: n rows.
        """
        with self._lock:
            self._parts.append((positions, table))
            if len(self._parts) < self.num_chunks:
                return
        tables = [part for _, part in self._parts]
        rows = tables[0] if len(tables) == 1 else load_pyarrow().concat_tables(tables)
        order = np.argsort(np.concatenate([places for places, _ in self._parts]))
        self._parts = []
        self._table = rows.take(order).combine_chunks()

    def complete(self, names: Sequence[str]) -> pa.Table:
        """The finished table."""
        assert self._table is not None
        return self._table
