"""Parquet in a store -> batches of tensors, in an order that (seed, epoch) alone decides."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch

from hvd_cluster.data import row_transform, shards
from hvd_cluster.data.dataset import Split
from hvd_cluster.data.read_ahead import ReadAhead
from hvd_cluster.data.row_group_reader import RowGroupReader, place_of
from hvd_cluster.data.row_transform import RowTransform
from hvd_cluster.data.schema import Schema
from hvd_cluster.data.shards import Block, Remainder, RowRange
from hvd_cluster.data.store import Store
from hvd_cluster.data.weave import Batch, remaining_blocks, weave
from hvd_cluster.errors import DataError

#: Rows that are shuffled among each other at a time: as many as take WINDOW_BYTES (a size that processor caches
#: like), and at least WINDOW_ROWS (for rows as large as images), but no more than take MAX_WINDOW_BYTES.
WINDOW_BYTES = 16 * 1024 * 1024
WINDOW_ROWS = 4096
MAX_WINDOW_BYTES = 128 * 1024 * 1024
#: Bytes of decoded rows that may wait for the consumer.
PREFETCH_BYTES = 256 * 1024 * 1024


class ParquetReader:
    """Batches of tensors from the row groups of a split.

    The order of rows is a pure function of the split, the schema, ``seed`` and ``epoch``: neither the number of threads
    nor the bounds of read-ahead change it, and :mod:`hvd_cluster.data.shards` says how ranks share it.

    Memory: decoded rows that wait or are in use take at most ``prefetch_bytes`` plus two windows for each lane that
    this rank reads; while a window is being decoded it takes up to three times its size, in each thread. A window has
    ``window_bytes``, or the size of the largest row group where that is larger.

    Args:
        split: what to read.
        schema: the columns to read.
        store: serves the paths of the split.
        batch_size: rows per rank and step.
        rank, size: this rank, and the number of ranks.
        seed: chooses the order together with the epoch.
        shuffle: whether to permute rows; False keeps the order of the data (in each lane).
        remainder: what happens to the rows that do not fill the last global batch: "drop", "pad" or "partial".
        transformation_fn: function from row (dict of NumPy scalars, arrays, str, bytes) to row (dict of numbers, arrays
            or tensors), run in the reader's threads; the columns of the first row it returns become the batches'
            columns.
        num_threads: threads that read ahead.
        prefetch_bytes: bound of decoded rows that wait.
        window_bytes: size of the rows that are shuffled among each other, a part of what decides the order; None for
            16 MiB, and up to 128 MiB where rows are large.

    Raises:
        DataError: the split is empty, or there are string or binary columns and no ``transformation_fn``.
    """

    def __init__(
        self,
        split: Split,
        schema: Schema,
        store: Store,
        *,
        batch_size: int,
        rank: int = 0,
        size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        remainder: Remainder = "drop",
        transformation_fn: RowTransform | None = None,
        num_threads: int = 2,
        prefetch_bytes: int = PREFETCH_BYTES,
        window_bytes: int | None = None,
    ) -> None:
        if not split.rows:
            raise DataError(f"there are no rows to read in {store.prefix!r}")
        if batch_size < 1 or num_threads < 1:
            raise DataError(f"batch_size is {batch_size} and num_threads {num_threads}: both must be at least 1")
        if transformation_fn is None:
            schema.require_tensors()
        self._split = split
        self._schema = schema
        self._row_groups = RowGroupReader(store, schema)
        self._batch_size = batch_size
        self._rank, self._size = rank, size
        self._seed = seed
        self._shuffle = shuffle
        self._remainder = remainder
        self._transform = transformation_fn
        self._num_threads = num_threads
        self._prefetch_bytes = prefetch_bytes
        self._row_bytes = _row_bytes(split, schema)
        if window_bytes is None:
            window_bytes = min(max(WINDOW_BYTES, WINDOW_ROWS * self._row_bytes), MAX_WINDOW_BYTES)
        self._window_rows = max(1, window_bytes // self._row_bytes)
        self._output_schema: Schema | None = None

    @property
    def steps(self) -> int:
        """Batches per epoch, the same on every rank."""
        return shards.num_steps(self._split.rows, self._batch_size, self._size, self._remainder)

    @property
    def schema(self) -> Schema:
        """The columns of the batches. With a ``transformation_fn`` it is learned from the split's first row.

        Raises:
            DataError: the first row cannot be read or transformed.
        """
        if self._output_schema is None and self._transform is not None:
            first = RowRange(self._split.row_groups[0], 0, 1)
            table, place = self._row_groups.table(first), place_of(first)
            _, self._output_schema = row_transform.apply(self._transform, table, self._schema, None, place)
        return self._output_schema or self._schema

    def plan(self, epoch: int) -> shards.ShardPlan:
        """What this rank reads in an epoch: its steps, and which rows are padding."""
        return shards.plan(
            self._split,
            self._rank,
            self._size,
            self._batch_size,
            seed=self._seed,
            epoch=epoch,
            shuffle=self._shuffle,
            remainder=self._remainder,
            window_rows=self._window_rows,
        )

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[Batch]:
        """The batches of an epoch.

        Closing the iterator, or dropping it, ends its threads.

        Args:
            epoch: number of the epoch, any integer.
            start_step: the first step wanted; what only earlier ones need is not read.

        Yields:
            Column name -> tensor of shape ``(rows, *column.shape)`` on the CPU. A tensor may be a view of a larger one
            that no other batch overlaps.

        Raises:
            DataError: data cannot be read, or is not what the schema says; file and row group are named.
        """
        plan = self.plan(epoch)
        blocks = remaining_blocks(plan, start_step)
        if start_step >= plan.steps:
            return
        output = self.schema  # once, before the threads need it
        row_bytes = max(self._row_bytes, output.row_bytes)
        ahead: ReadAhead[Batch] = ReadAhead(
            lambda index, stopped: self._block(blocks[index], output, stopped),
            [block.window_rows * row_bytes for block in blocks],
            self._num_threads,
            self._prefetch_bytes,
        )
        try:
            yield from weave(plan, blocks, ahead.take, output, start_step)
        finally:
            ahead.close()

    def _block(self, block: Block, output: Schema, stopped: Callable[[], bool]) -> Batch:
        """Read a window, and pick and order this rank's rows of it."""
        if self._transform is not None:
            return self._transformed_block(block, self._transform, output, stopped)
        tensors = self._row_groups.tensors(block.ranges)
        if block.seeds is None and block.stride == 1:
            rows = slice(block.offset, block.offset + block.rows)
            return {name: tensor[rows] for name, tensor in tensors.items()}
        order = torch.from_numpy(block.order())
        return {name: tensors.pop(name).index_select(0, order) for name in output.names}

    def _transformed_block(
        self, block: Block, transform: RowTransform, output: Schema, stopped: Callable[[], bool]
    ) -> Batch:
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
                table = self._row_groups.table(piece).take(rows)
                numbers = (rows + piece.row_group.start + piece.start).tolist()
                place = place_of(piece)
                part, _ = row_transform.apply(transform, table, self._schema, output, place, numbers, stopped)
                parts.append(part)
        if stopped():
            return {}
        positions = torch.from_numpy(np.searchsorted(kept, order))
        return {name: torch.cat([part.pop(name) for part in parts]).index_select(0, positions) for name in output.names}


def _row_bytes(split: Split, schema: Schema) -> int:
    """Bytes of a decoded row: what the schema says, or what the files hold where that is more (strings)."""
    return max(1, schema.row_bytes, sum(group.size_bytes for group in split.row_groups) // split.rows)
