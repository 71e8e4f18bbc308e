"""The rows or batches of a petastorm data set, or of any Parquet.

An iterator over our reading threads.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import Any

from hvd_cluster.data.reading.read_ahead import ReadAhead, ReadAheadClosedError
from hvd_cluster.monitor.step_clock import DATA, step_clock
from hvd_cluster.petastorm.columns import objects
from hvd_cluster.petastorm.epoch_order import EpochOrder
from hvd_cluster.petastorm.errors import NoDataAvailableError
from hvd_cluster.petastorm.fragment_reader import FragmentDecoder, RowBatch
from hvd_cluster.petastorm.unischema import Unischema

#: Bytes of read row groups that may wait, before decoding.
PREFETCH_BYTES = 256 * 1024 * 1024


class Reader:
    """Rows, or batches of rows, of a data set: an iterator and a context manager.

    Made by ``make_reader`` and ``make_batch_reader`` (``factories.py``). The order is a pure function of the data set,
    the seed and the number of the pass, whatever the number of threads. Threads start with the first row asked for, and
    end with :meth:`stop`, at the end of the ``with`` block, after the last row, or when the reader is dropped. Another
    thread may stop the reader while this one waits for a row. A fragment that cannot be read raises one error; the next
    request returns the fragment after it.

    Args:
        fragments: reads a fragment.
        order: of the fragments.
        batched: whether each item is a batch.
        num_threads: that read ahead; 0 reads in the caller's thread.
        queue_size: fragments that may wait, at most.
    """

    def __init__(
        self, fragments: FragmentDecoder, order: EpochOrder, *, batched: bool, num_threads: int, queue_size: int
    ) -> None:
        self._fragments = fragments
        self._order = order
        self._batched = batched
        self._num_threads = num_threads
        self._min_bytes = PREFETCH_BYTES // queue_size  # that a fragment counts for
        self._ahead: ReadAhead[RowBatch] | None = None
        self._end: weakref.finalize[Any, Any] | None = None
        self._lock = threading.Lock()  # of these two and `_stopped`: no threads begin once it is stopped
        self._next_index = 0
        self._num_empty = 0
        self._rows: Iterator[Any] = iter(())
        self._stopped = False
        #: Whether the last row was returned.
        self.last_row_consumed = False
        #: The fields of the rows.
        self.schema: Unischema = fragments.output
        #: None: windows over time are not supported.
        self.ngram = None

    @property
    def batched_output(self) -> bool:
        """Whether each item is a batch: a namedtuple of arrays of n rows."""
        return self._batched

    @property
    def num_epochs(self) -> int | None:
        """Passes over the data; None for no end."""
        return self._order.num_epochs

    @property
    def seed(self) -> int:
        """Of the order."""
        return self._order.seed

    @property
    def diagnostics(self) -> dict[str, Any]:
        """Counts of what has been read."""
        return {"pieces_read": self._next_index, "pieces": len(self._order.fragments), "threads": self._num_threads}

    def __iter__(self) -> Reader:
        return self

    def __next__(self) -> Any:
        """A row as a namedtuple, or a batch as a namedtuple of arrays.

        Raises:
            StopIteration: all passes are over.
            DataError: data cannot be read or decoded; file and row group are named.
            RuntimeError: the reader was stopped.
        """
        if self._batched:
            batch = self.next_batch()
            values = (
                objects(column) if isinstance(column, list) else column
                for column in (batch.columns[name] for name in self.schema.fields)
            )
            return self.schema.row_type._make(values)
        while True:
            for row in self._rows:
                return row
            batch = self.next_batch()
            columns = [batch.columns[name] for name in self.schema.fields]
            self._rows = map(self.schema.row_type._make, zip(*columns, strict=True))

    def next(self) -> Any:
        """The same as ``next(reader)``."""
        return next(self)

    def next_batch(self) -> RowBatch:
        """The next rows, column by column, for the loaders.

        Rows that ``next`` has begun to give come first.

        Raises:
            StopIteration: all passes are over.
            RuntimeError: the reader was stopped.
        """
        with step_clock.span(DATA):
            return self._next_batch()

    def _next_batch(self) -> RowBatch:
        if self._stopped:
            raise ReadAheadClosedError
        rest = list(self._rows)
        if rest:
            columns = [list(values) for values in zip(*rest, strict=True)]
            return RowBatch(dict(zip(self.schema.fields, columns, strict=True)), len(rest))
        while self._next_index < self._order.count:
            try:
                batch = self._take(self._next_index)
            except Exception:  # it costs one fragment; an interrupted wait (Ctrl-C) costs none
                self._next_index += 1
                raise
            self._next_index += 1
            if self._stopped:  # meanwhile, and so the batch may be cut short
                raise ReadAheadClosedError
            if batch.rows:
                self._num_empty = 0
                return batch
            self._num_empty += 1
            if self._order.num_epochs is None and self._num_empty >= len(self._order.fragments):
                raise NoDataAvailableError(
                    "no row matches the predicate and the filters; with num_epochs=None the reader would never return"
                )
        self.last_row_consumed = True
        self._close()
        raise StopIteration

    def row_batches(self) -> Iterator[RowBatch]:
        """What is left of all passes, as :meth:`next_batch` returns it."""
        while True:
            try:
                batch = self.next_batch()
            except StopIteration:
                return
            yield batch

    def reset(self) -> None:
        """Start again, in new orders, after the last row.

        Raises:
            NotImplementedError: not all rows have been given.
        """
        if self._stopped:
            return
        if not self.last_row_consumed:
            raise NotImplementedError(
                "a reader can be reset only when all its rows have been given: to leave a pass early and continue, "
                "take the batches of all epochs from one iterator (batches = iter(loader)) over a reader with "
                "num_epochs=None, or make a new reader"
            )
        self._order = self._order.after()
        self._next_index = self._num_empty = 0
        self.last_row_consumed = False

    def stop(self) -> None:
        """End the threads; the reader cannot be used afterwards."""
        with self._lock:
            self._stopped = True
        self._rows = iter(())
        self._close()

    def join(self) -> None:
        """Wait for the threads to end, and empty the cache."""
        self._close()
        self._fragments.cleanup()

    def cleanup_cache(self) -> None:
        """Empty the cache."""
        self._fragments.cleanup()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()
        self.join()

    def _take(self, index: int) -> RowBatch:
        order, fragments, min_bytes = self._order, self._fragments, self._min_bytes
        if not self._num_threads:
            return fragments.read(order.fragment(index), order.row_seeds(index), lambda: self._stopped)
        with self._lock:
            if self._stopped:
                raise ReadAheadClosedError
            if self._ahead is None:
                self._ahead = ReadAhead(
                    lambda index, stopped: fragments.read(order.fragment(index), order.row_seeds(index), stopped),
                    (max(min_bytes, order.fragment(number).size_bytes) for number in range(order.count)),
                    self._num_threads,
                    PREFETCH_BYTES,
                )
                # The threads know the work, not the reader, so that dropping the reader ends them.
                self._end = weakref.finalize(self, self._ahead.close)
                self._end.atexit = False  # the end of the interpreter closes all of them, with one limit of time
            ahead = self._ahead
        return ahead.take()

    def _close(self) -> None:
        with self._lock:
            end, self._ahead, self._end = self._end, None, None
        if end is not None:
            end()
