"""The function that Spark runs in every task of a job, and the rows that it returns.

:func:`task_for` returns a function that pickles by value and imports nothing of ours before it runs, so that an
executor without this package answers with a sentence and not with a failed unpickling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

#: The columns of a task's rows: the slot that the row is about; what ``data`` is; the number of this piece of it; the
#: piece.
SCHEMA = "slot int, kind string, part int, data binary"
#: How a module comes to the workers; see :func:`hvd_cluster.launch.call.pack`.
MODULE_REMEDY = (
    "install it on the executors, or ship it from the driver with spark.addArtifacts('FILE.py', pyfile=True) "
    "(on a classic session also SparkContext.addPyFile('FILE.py')) or spark.submit.pyFiles"
)


def task_for(
    module: str, arguments: tuple[Any, ...], *, barrier: bool, receiver: str = ""
) -> Callable[[Iterable[Any]], Iterator[Any]]:
    """The function for ``mapInArrow``.

    Args:
        module: a module of ours, whose ``perform(context, *arguments)`` does the work and returns rows as
            (slot, kind, data), those with the pieces of one value in their order.
        arguments: plain data, or what :meth:`Session.ship` returned.
        barrier: it is a task of a barrier stage; the others then wait for its word.
        receiver: what takes the task's rows, see :class:`hvd_cluster.spark.rows.Rows`; empty where they say nothing.
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
                from hvd_cluster.spark.rows import received

                rows = work.perform(context, *arguments, received(receiver, batches))
            else:
                rows = work.perform(context, *arguments)
        for _ in batches:  # Spark wants its input read
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
    """The sentences with which tasks refused to work, each once."""
    texts = [bytes(row.data).decode("utf-8", "replace") for row in rows if row.kind == "problem"]
    return list(dict.fromkeys(texts))
