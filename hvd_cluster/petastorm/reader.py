"""Reader: the rows or batches of a petastorm data set, or of any Parquet, as an iterator over our reading threads."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import Any

from hvd_cluster.data.reading.read_ahead import STOPPED, ReadAhead
from hvd_cluster.petastorm.chunks import Chunk, ChunkReader
from hvd_cluster.petastorm.columns import objects
from hvd_cluster.petastorm.errors import NoDataAvailableError
from hvd_cluster.petastorm.order import EpochOrder, Sizes
from hvd_cluster.petastorm.unischema import Unischema

#: Bytes of read row groups that may wait, before decoding.
PREFETCH_BYTES = 256 * 1024 * 1024


class Reader:
    """Rows, or batches of rows, of a data set: an iterator and a context manager.

    Made by ``make_reader`` and ``make_batch_reader`` (``factories.py``). The order is a pure function of the data set,
    the seed and the number of the pass, whatever the number of threads. Threads start with the first row asked for, and
    end with :meth:`stop`, at the end of the ``with`` block, after the last row, or when the reader is dropped. Another
    thread may stop the reader while this one waits for a row. A piece that cannot be read is an error once; what is
    asked for after it is the next piece.

    Args:
        chunks: reads a piece.
        order: of the pieces.
        batched: whether each item is a batch.
        num_threads: that read ahead; 0 reads in the caller's thread.
        queue_size: pieces that may wait, at most.
    """

    def __init__(
        self, chunks: ChunkReader, order: EpochOrder, *, batched: bool, num_threads: int, queue_size: int
    ) -> None:
        self._chunks = chunks
        self._order = order
        self._batched = batched
        self._num_threads = num_threads
        self._sizes = Sizes(order, PREFETCH_BYTES // queue_size)
        self._ahead: ReadAhead[Chunk] | None = None
        self._end: weakref.finalize[Any, Any] | None = None
        self._lock = threading.Lock()  # of these two and `_stopped`: no threads begin once it is stopped
        self._next_piece = 0
        self._empty_pieces = 0
        self._rows: Iterator[Any] = iter(())
        self._stopped = False
        #: Whether the last row was given.
        self.last_row_consumed = False
        #: The fields of the rows.
        self.schema: Unischema = chunks.output
        #: None: no windows over time.
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
        """What has been read so far."""
        return {"pieces_read": self._next_piece, "pieces": len(self._order.pieces), "threads": self._num_threads}

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
            chunk = self.next_chunk()
            values = (
                column if not isinstance(column, list) else objects(column)
                for column in (chunk.columns[name] for name in self.schema.fields)
            )
            return self.schema.row_type._make(values)
        while True:
            for row in self._rows:
                return row
            chunk = self.next_chunk()
            columns = [chunk.columns[name] for name in self.schema.fields]
            self._rows = map(self.schema.row_type._make, zip(*columns, strict=True))

    def next(self) -> Any:
        """The same as ``next(reader)``."""
        return next(self)

    def next_chunk(self) -> Chunk:
        """The next rows, column by column: what the loaders use. Rows that ``next`` has begun to give come first.

        Raises:
            StopIteration: all passes are over.
            RuntimeError: the reader was stopped.
        """
        if self._stopped:
            raise RuntimeError(STOPPED)
        rest = list(self._rows)
        if rest:
            columns = [list(values) for values in zip(*rest, strict=True)]
            return Chunk(dict(zip(self.schema.fields, columns, strict=True)), len(rest))
        while self._next_piece < self._order.count:
            try:
                chunk = self._take(self._next_piece)
            except Exception:  # it costs one piece; an interrupted wait (Ctrl-C) costs none
                self._next_piece += 1
                raise
            self._next_piece += 1
            if self._stopped:  # meanwhile, and so the chunk may be cut short
                raise RuntimeError(STOPPED)
            if chunk.rows:
                self._empty_pieces = 0
                return chunk
            self._empty_pieces += 1
            if self._order.num_epochs is None and self._empty_pieces >= len(self._order.pieces):
                raise NoDataAvailableError(
                    "no row matches the predicate and the filters, and num_epochs=None would look for one for ever"
                )
        self.last_row_consumed = True
        self._close()
        raise StopIteration

    def reset(self) -> None:
        """Begin anew, in new orders, after the last row.

        Raises:
            NotImplementedError: not all rows have been given.
        """
        if self._stopped:
            return
        if not self.last_row_consumed:
            raise NotImplementedError("a reader can be reset only when all its rows have been given")
        self._order = self._order.after()
        self._sizes = Sizes(self._order, self._sizes.least_bytes)
        self._next_piece = self._empty_pieces = 0
        self.last_row_consumed = False

    def stop(self) -> None:
        """End the threads; nothing can be read any more."""
        with self._lock:
            self._stopped = True
        self._rows = iter(())
        self._close()

    def join(self) -> None:
        """Wait for the threads to end, and forget the cache."""
        self._close()
        self._chunks.cache.cleanup()

    def cleanup_cache(self) -> None:
        """Forget the cache."""
        self._chunks.cache.cleanup()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()
        self.join()

    def _take(self, index: int) -> Chunk:
        order, chunks, sizes = self._order, self._chunks, self._sizes
        if not self._num_threads:
            return chunks.chunk(order.piece(index), order.row_seeds(index), lambda: self._stopped)
        with self._lock:
            if self._stopped:
                raise RuntimeError(STOPPED)
            if self._ahead is None:
                self._ahead = ReadAhead(
                    lambda index, stopped: chunks.chunk(order.piece(index), order.row_seeds(index), stopped),
                    map(sizes.__getitem__, range(len(sizes))),
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
