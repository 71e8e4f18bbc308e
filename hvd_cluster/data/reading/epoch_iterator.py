"""Iterates over a reader's epochs; what one epoch read ahead serves the next."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Generator
from typing import Any

from hvd_cluster.data.reading.batch_mapping import BatchMapping
from hvd_cluster.data.reading.budget import Budget
from hvd_cluster.data.reading.pipeline import Blocks, Pipeline
from hvd_cluster.data.reading.position import Planner, Position
from hvd_cluster.data.reading.row_form import Batch
from hvd_cluster.data.reading.shards import ShardPlan
from hvd_cluster.monitor.timed_calls import timed_items


class EpochIterator:
    """Batches from any position. Dropping it ends its threads.

    Args:
        planner: makes the plans.
        blocks: reads what they say.
        budget: how much at a time.
        end_epoch: epochs below this one will be asked for, one after the other; None where that is not known.
        mapping: makes batches of what ``blocks`` reads; None if that is tensors already.
    """

    def __init__(
        self,
        planner: Planner,
        blocks: Blocks[Any],
        budget: Budget,
        end_epoch: int | None,
        mapping: BatchMapping | None = None,
    ) -> None:
        self.planner = planner
        self.budget = budget
        self._blocks = blocks
        self._end_epoch = end_epoch
        self._mapping = mapping
        #: The pipeline that has read beyond the end of an epoch, its position, and the callback that closes it.
        self._ahead: tuple[Pipeline[Any], Position, weakref.finalize[..., Any]] | None = None

    def batches(self, position: Position) -> Generator[tuple[ShardPlan, Batch], None, None]:
        """The batches from a position to the end of its epoch, each with its plan.

        Closing the iterator ends the threads, unless its last batch was handed out and another epoch follows.
        """
        pipeline = self._pipeline(position)
        whole = False
        try:
            plan, batches = pipeline.next_pass()
            whole = not plan.steps
            if self._mapping is not None:
                batches = self._mapping.mapped(plan, position.epoch, batches)
            with contextlib.closing(batches):  # its threads end before those that it takes from
                for number, batch in enumerate(timed_items(batches), 1):
                    whole = number == plan.steps
                    yield plan, batch
        finally:
            following = Position(epoch=position.epoch + 1)
            if whole and self._goes_on(following.epoch):
                self.close()
                end = weakref.finalize(self, pipeline.close)
                end.atexit = False  # the end of the interpreter closes all of them, with one limit of time
                self._ahead = pipeline, following, end
            else:
                pipeline.close()

    def close(self) -> None:
        """End the pipeline that reads ahead into an epoch that has not begun."""
        if self._ahead is not None:
            _, _, end = self._ahead
            self._ahead = None
            end()

    def _pipeline(self, position: Position) -> Pipeline[Any]:
        """The pipeline that already reads ahead from a position, or a new one."""
        if self._ahead is not None:
            pipeline, reached, end = self._ahead
            if reached == position and pipeline.alive:
                end.detach()
                self._ahead = None
                return pipeline
            self.close()
        later = range(position.epoch + 1, self._end_epoch or 0) if self._goes_on(position.epoch + 1) else ()
        positions = itertools.chain([position], (Position(epoch=epoch) for epoch in later))
        # It knows the planner and not us, so that dropping us ends its threads.
        return Pipeline(map(self.planner.plan, positions), self._blocks, self.budget)

    def _goes_on(self, epoch: int) -> bool:
        return self._end_epoch is not None and epoch < self._end_epoch

    def __getstate__(self) -> dict[str, Any]:
        """Threads are not pickled."""
        return {**self.__dict__, "_ahead": None}
