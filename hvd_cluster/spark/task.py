"""The function that Spark runs in every barrier task, and the rows that it returns.

:func:`task_for` returns a function that pickles by value and imports nothing of ours before it runs, so that an
executor without this package answers with a sentence and not with a failed unpickling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

#: The columns of a task's rows: its partition; what ``data`` is; the number of this piece of it; the piece.
SCHEMA = "seat int, kind string, part int, data binary"


def task_for(versions: dict[str, str], plan: bytes, call: Any) -> Callable[[Iterable[Any]], Iterator[Any]]:
    """The function for ``mapInArrow``.

    Args:
        versions: the fields of the driver's :class:`~hvd_cluster.spark.plan.Versions`.
        plan: the pickled :class:`~hvd_cluster.spark.plan.Plan`.
        call: what :meth:`Session.ship` returned for the packed call.
    """

    def task(batches: Iterable[Any]) -> Iterator[Any]:
        import json
        import socket
        import sys

        import pyarrow as pa
        from pyspark import BarrierTaskContext

        for _ in batches:  # Spark wants its input read
            pass
        context = BarrierTaskContext.get()
        seat = context.partitionId()
        try:
            from hvd_cluster.spark import barrier
        except ImportError as error:
            problem = (
                f"hvd_cluster cannot be imported on {socket.gethostname()} by {sys.executable} ({error}): install it "
                "there, or ship it with the session (spark.submit.pyFiles, spark.archives, addArtifacts)"
            )
            # The other tasks wait for this one's word.
            context.allGather(json.dumps({"seat": seat, "problem": problem}))
            pieces = [("problem", problem.encode())]
        else:
            pieces = barrier.perform(context, versions, plan, call)
        for part, (kind, data) in enumerate(pieces):
            yield pa.RecordBatch.from_arrays(
                [
                    pa.array([seat], pa.int32()),
                    pa.array([kind], pa.string()),
                    pa.array([part], pa.int32()),
                    pa.array([data], pa.binary()),
                ],
                names=["seat", "kind", "part", "data"],
            )

    return task
