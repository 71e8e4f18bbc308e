"""The function that Spark runs in each task of a job, and its rows.

Spark passes rows to it, and it returns rows. :func:`task_for` returns a function that is pickled by value and imports
nothing of this package before it runs, so that an executor without the package returns a message instead of failing to
unpickle.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

#: The columns of a task's rows: the slot that the row is about; the kind of ``data``; the number of this piece; the
#: piece.
SCHEMA = "slot int, kind string, part int, data binary"
#: How to make a module available to the workers; see :func:`hvd_cluster.launch.call.pack`.
MODULE_REMEDY = (
    "install it on the executors, or ship it from the driver with spark.addArtifacts('FILE.py', pyfile=True) "
    "(on a classic session also SparkContext.addPyFile('FILE.py')) or spark.submit.pyFiles"
)


def task_for(
    module: str, arguments: tuple[Any, ...], *, barrier: bool, receiver: str = ""
) -> Callable[[Iterable[Any]], Iterator[Any]]:
    """The function for ``mapInArrow``.

    Args:
        module: a module of this package whose ``perform(context, *arguments)`` does the work and returns rows as (slot,
            kind, data), with the pieces of one value in order.
        arguments: plain data, or what :meth:`Session.ship` returned.
        barrier: whether it is a task of a barrier stage; the others then wait for its message.
        receiver: receives the task's rows, see :class:`hvd_cluster.spark.task_function.Rows`; empty to ignore them.
    """

    def task(batches: Iterable[Any]) -> Iterator[Any]:
        import importlib
        import json
        import socket
        import sys

        import pyarrow as pa
        from pyspark import BarrierTaskContext, TaskContext

        context = BarrierTaskContext.get() if barrier else TaskContext.get()
        try:
            work = importlib.import_module(module)
        except ImportError as error:
            problem = (
                f"hvd_cluster cannot be imported on {socket.gethostname()} by {sys.executable} ({error}): install it "
                "there, or ship it with the session (spark.submit.pyFiles, spark.archives, addArtifacts)"
            )
            slot = context.partitionId()
            if barrier:
                context.allGather(json.dumps({"slot": slot, "problem": problem}))
            rows = [(slot, "problem", problem.encode())]
        else:
            if receiver:
                from hvd_cluster.spark.task_function import received

                rows = work.perform(context, *arguments, received(receiver, batches))
            else:
                rows = work.perform(context, *arguments)
        for _ in batches:  # Spark requires that the input is read
            pass
        for part, (slot, kind, data) in enumerate(rows):
            yield pa.RecordBatch.from_arrays(
                [
                    pa.array([slot], pa.int32()),
                    pa.array([kind], pa.string()),
                    pa.array([part], pa.int32()),
                    pa.array([data], pa.binary()),
                ],
                names=["slot", "kind", "part", "data"],
            )

    return task


def problems(rows: Iterable[Any]) -> list[str]:
    """The problems that tasks reported, each once."""
    texts = [bytes(row.data).decode("utf-8", "replace") for row in rows if row.kind == "problem"]
    return list(dict.fromkeys(texts))


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
        """The rows in ``count`` partitions, by a shuffle.

        Barrier stages do not accept coalesced partitions.
        """
        return self.frame.repartition(count, self.key)


def received(receiver: str, batches: Iterable[Any]) -> contextlib.AbstractContextManager[dict[str, str]]:
    """The context in which a task's rows are available to its workers."""
    module, _, name = receiver.partition(":")
    context: contextlib.AbstractContextManager[dict[str, str]] = getattr(importlib.import_module(module), name)(batches)
    return context
