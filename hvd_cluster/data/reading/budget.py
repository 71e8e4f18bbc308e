"""How much is read and shuffled at a time, and the memory bound that follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hvd_cluster.data.dataset import Split
from hvd_cluster.data.reading.footers import bound_bytes
from hvd_cluster.data.reading.interleave import SLAB_BYTES

#: Rows that are shuffled among each other at a time: as many as take WINDOW_BYTES (a size that processor caches
#: like), and at least WINDOW_ROWS (for rows as large as images), but no more than take MAX_WINDOW_BYTES.
WINDOW_BYTES = 16 * 1024 * 1024
WINDOW_ROWS = 4096
MAX_WINDOW_BYTES = 128 * 1024 * 1024
#: Rows that a thread reads at once take this many bytes, or are one row group: a window of WINDOW_BYTES is read at one
#: go, for which there is some room, as its row groups may be larger than the average one.
_CHUNK_ROOM = 9 / 8
CHUNK_BYTES = int(WINDOW_BYTES * _CHUNK_ROOM)
#: Bytes of decoded rows that may wait for the consumer.
PREFETCH_BYTES = 256 * 1024 * 1024
#: What a thread's memory allocator holds back for later: the most that was measured, beside busy processes.
_KEPT_BYTES = 5 * 1024 * 1024
#: For each row of a window whose order a thread works out: the permutation, and the places of its rows.
_INDEX_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Sizes in rows and bytes. Only ``window_rows`` affects the order of rows."""

    #: Bytes of a row: in a batch, or as Arrow data (on average over all rows), whichever is larger.
    row_bytes: int
    #: Rows that are shuffled among each other at a time; a larger row group is a window of its own.
    window_rows: int
    #: Bytes that a thread reads in one call; a larger row group is read alone.
    chunk_bytes: int
    #: Threads that read.
    num_threads: int
    #: Bound of rows that wait.
    prefetch_bytes: int

    @classmethod
    def of(
        cls, split: Split, row_bytes: int, window_bytes: int | None, num_threads: int, prefetch_bytes: int
    ) -> Budget:
        """The budget for a split."""
        row_bytes = max(1, row_bytes, sum(group.size_bytes for group in split.row_groups) // split.rows)
        if window_bytes is None:
            window_bytes = min(max(WINDOW_BYTES, WINDOW_ROWS * row_bytes), MAX_WINDOW_BYTES)
        window_rows = max(1, window_bytes // row_bytes)
        return cls(
            row_bytes=row_bytes,
            window_rows=window_rows,
            chunk_bytes=min(CHUNK_BYTES, int(window_rows * row_bytes * _CHUNK_ROOM)),
            num_threads=num_threads,
            prefetch_bytes=prefetch_bytes,
        )

    def total_bytes(self, split: Split, footers: Sequence[int], num_slots: int, batch_size: int) -> int:
        """A bound of the memory that reading a split takes, in bytes.

        See ``ParquetReader.memory_bytes``.
        """
        largest = max(split.row_groups, key=lambda group: group.rows)
        window_rows = min(max(self.window_rows, largest.rows), split.rows)
        window = window_rows * self.row_bytes
        heaviest = max(max(group.read_bytes, group.rows * self.row_bytes) for group in split.row_groups)
        every = sum(max(group.read_bytes, group.rows * self.row_bytes) for group in split.row_groups)
        chunk = max(min(self.chunk_bytes, every), heaviest)
        waiting = max(self.prefetch_bytes, min(chunk, window))
        batches = 2 * max(min(SLAB_BYTES, window), batch_size * self.row_bytes)
        indices = self.num_threads * _INDEX_BYTES * window_rows
        kept = (self.num_threads + 1) * _KEPT_BYTES + bound_bytes(footers, self.num_threads)
        return waiting + 3 * self.num_threads * chunk + 2 * num_slots * window + batches + indices + kept
