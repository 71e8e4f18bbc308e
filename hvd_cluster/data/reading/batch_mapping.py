"""Tables -> batches of tensors, through the user's function over batches.

It has threads of its own.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING

import torch

from hvd_cluster.data.preprocessing import AllRowsFailedError, Preprocess
from hvd_cluster.data.reading.raw_blocks import RawBlockReader
from hvd_cluster.data.reading.row_form import Batch, TensorRows
from hvd_cluster.data.reading.shards import ShardPlan
from hvd_cluster.data.reading.tensors import to_tensors
from hvd_cluster.data.schema import Schema
from hvd_cluster.errors import DataError
from hvd_cluster.monitor.activities import activity
from hvd_cluster.monitor.stacks import describe_threads
from hvd_cluster.settings import Settings

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger(__name__)

#: Rows that are tried at a time, where the function fails on all rows of a batch.
_TRIED_ROWS = 64


def _result(future: Future[Batch]) -> Batch:
    """The result, with a warning if it takes long."""
    if not future.done():
        settings = Settings.from_env()
        if not wait([future], settings.stall_warning_s).done and not settings.stall_check_disable:
            doing = "; ".join(describe_threads())
            logger.warning("the next batch has not come for %.0f s: %s", settings.stall_warning_s, doing)
    return future.result()


class PreprocessedBatch(Batch):
    """A batch that lacks rows on which the user's function failed."""

    #: How many, without those that only fill up the batch.
    num_left_out: int


@dataclass(frozen=True)
class BatchMapping:
    """Makes batches of tables: some columns through the user's function.

    The other columns stay as they are.
    """

    preprocess: Preprocess
    blocks: RawBlockReader
    #: The other columns.
    schema: Schema
    seed: int
    rank: int
    num_threads: int

    def mapped(self, plan: ShardPlan, epoch: int, tables: Iterator[pa.Table]) -> Generator[Batch, None, None]:
        """The batch of each step; a few are made ahead.

        What a function draws depends on the position only.
        """
        waiting: deque[Future[Batch]] = deque()
        pool = ThreadPoolExecutor(len(self._functions), thread_name_prefix="hvd-preprocess")
        free = SimpleQueue[Preprocess]()
        for function in self._functions:
            free.put(function)
        try:
            for step, table in enumerate(tables):
                seeds = (self.seed, epoch, self.rank, plan.position_at(step))
                waiting.append(pool.submit(self._batch, free, table, seeds, plan.fresh_in(step)))
                if len(waiting) > 2 * self.num_threads:
                    yield _result(waiting.popleft())
            while waiting:
                yield _result(waiting.popleft())
        finally:
            pool.shutdown(cancel_futures=True)

    @functools.cached_property
    def _functions(self) -> list[Preprocess]:
        """One function for each thread.

        Most objects of users, such as tokenizers, are not made for calls at the same time.
        """
        copies = [self.preprocess.copied() for _ in range(self.num_threads - 1)]
        return [self.preprocess, *(copy for copy in copies if copy is not None)]

    def _batch(self, free: SimpleQueue[Preprocess], table: pa.Table, seeds: tuple[int, ...], num_fresh: int) -> Batch:
        """The batch of a table, whose first ``num_fresh`` rows are new in the epoch.

        If the function fails on all of its rows, it has as many copies of another row; with ``training=False``, none.
        """
        if not table.num_rows:
            return TensorRows(self.schema).empty()
        function = free.get()
        try:
            return self._mapped(function, table, seeds, num_fresh)
        except AllRowsFailedError as error:
            batch = PreprocessedBatch(self._good_row(function, error))
            rows = torch.zeros(table.num_rows if function.training else 0, dtype=torch.int64)
            batch.update({name: tensor[rows] for name, tensor in batch.items()})
            batch.num_left_out = num_fresh
            return batch
        finally:
            free.put(function)

    def _good_row(self, function: Preprocess, error: AllRowsFailedError) -> Batch:
        """A row on which the function does not fail, the same for each call.

        Raises:
            AllRowsFailedError: there is none in the data.
        """
        for rows in self.blocks.samples(_TRIED_ROWS) if not self._found else ():
            with contextlib.suppress(AllRowsFailedError):
                made = self._mapped(function, rows, (0,), 0)
                self._found.update({name: tensor[:1].clone() for name, tensor in made.items()})
                break
        if not self._found:
            raise error
        return self._found

    @functools.cached_property
    def _found(self) -> Batch:
        """The row of :meth:`_good_row`, once it is known.

        Threads that search at the same time find the same one.
        """
        return Batch()

    def _mapped(self, function: Preprocess, table: pa.Table, seeds: tuple[int, ...], num_fresh: int) -> Batch:
        def place(row: int) -> str:
            return self.blocks.place(table, row)

        with activity(f"calling preprocess on {place(0)} and what follows it", warns=False):
            made, kept = function(table, seeds, place)
        left = table if kept is None else table.take(kept)
        others = to_tensors(left.select(self.schema.names), self.schema)
        if both := [name for name in made if name in others]:
            raise DataError(f"preprocess returned {both[0]!r}, which is another column's name: choose another name")
        batch = PreprocessedBatch(made | others)
        batch.num_left_out = 0 if kept is None else num_fresh - int((kept < num_fresh).sum())
        return batch
