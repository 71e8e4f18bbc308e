"""Rows of a DataFrame that a job's tasks get before their workers start, without a file system in between."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rows:
    """The argument ``rows`` of ``hvd_cluster.spark.run``."""

    #: A DataFrame, whose plan may end in a shuffle; ``key`` divides it into a partition for each task.
    frame: Any
    #: The column by which rows are distributed among the tasks.
    key: str
    #: "module:function" of ours: gets a task's Arrow batches, and returns a context of variables for the task's
    #: workers.
    receiver: str

    def for_tasks(self, count: int) -> Any:
        """The rows in ``count`` partitions; a shuffle, because barrier stages do not accept coalesced partitions."""
        return self.frame.repartition(count, self.key)


def received(receiver: str, batches: Iterable[Any]) -> contextlib.AbstractContextManager[dict[str, str]]:
    """The context in which a task's rows are available to its workers."""
    module, _, name = receiver.partition(":")
    context: contextlib.AbstractContextManager[dict[str, str]] = getattr(importlib.import_module(module), name)(batches)
    return context
