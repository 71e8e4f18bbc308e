"""Rows of a DataFrame that a job's tasks get before their workers start: no file system lies between."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rows:
    """What ``hvd_cluster.spark.run`` takes as ``rows``."""

    #: A DataFrame, whose plan may end in a shuffle; it is cut into a partition for each task by ``key``.
    frame: Any
    #: The column by which rows are shared out among the tasks.
    key: str
    #: "module:function" of ours: given a task's Arrow batches, a context of variables for the task's workers.
    receiver: str

    def for_tasks(self, count: int) -> Any:
        """The rows in ``count`` partitions; a shuffle, because barrier stages take no coalesced partitions."""
        return self.frame.repartition(count, self.key)


def received(receiver: str, batches: Iterable[Any]) -> contextlib.AbstractContextManager[dict[str, str]]:
    """The context in which a task's rows are there for its workers."""
    module, _, name = receiver.partition(":")
    context: contextlib.AbstractContextManager[dict[str, str]] = getattr(importlib.import_module(module), name)(batches)
    return context
