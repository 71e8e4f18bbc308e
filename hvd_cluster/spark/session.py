"""What running workers needs from a Spark session, whichever kind it is.

A new kind of session is a new file with a subclass of :class:`Session` and a branch in
:func:`hvd_cluster.spark.active_session.active`.
"""

from __future__ import annotations

import abc
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from hvd_cluster.data import spark_jobs
from hvd_cluster.errors import LaunchError
from hvd_cluster.spark.rows import Rows
from hvd_cluster.spark.slots import SlotCounts
from hvd_cluster.spark.task import SCHEMA

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: A packed call up to this size travels inside the tasks; a larger one once per executor.
INLINE_BYTES = 1 << 20


class Session(abc.ABC):
    """A live session of one kind. Methods may be called from any thread unless they say otherwise."""

    def __init__(self, spark: Any) -> None:
        #: The user's own ``SparkSession``.
        self.spark = spark

    def run_tasks(
        self,
        count: int,
        function: Callable[[Iterable[Any]], Iterator[Any]],
        *,
        barrier: bool,
        profile: Any = None,
        rows: Rows | None = None,
    ) -> list[Any]:
        """Run ``function`` in ``count`` tasks of one Spark job, and wait for their rows.

        Args:
            count: number of tasks.
            function: what :func:`hvd_cluster.spark.task.task_for` returned.
            barrier: all start together, or none.
            profile: a ``pyspark.resource.ResourceProfile`` for them; None for what the session's settings say.
            rows: what the tasks read; None for nothing.
        """
        frame: DataFrame = self.spark.range(0, count, 1, count) if rows is None else rows.for_tasks(count)
        more = {} if profile is None else {"profile": profile}
        found: list[Any] = frame.mapInArrow(function, SCHEMA, barrier=barrier, **more).collect()
        return found

    def takes_profiles(self) -> bool:
        """Whether this Spark lets the tasks of a DataFrame have a resource profile: since 4.0."""
        return "profile" in inspect.signature(type(self.spark.range(0)).mapInArrow).parameters

    def conf(self, name: str) -> str | None:
        """A setting of the session, or None where nobody has set it."""
        try:
            value = self.spark.conf.get(name, None)
        except Exception as error:  # whichever class: the text names the condition, others are raised
            if "CONFIG_NOT_AVAILABLE" not in str(error):
                raise
            return None  # a serverless cluster does not tell how it is made
        return None if value is None else str(value)

    @property
    def is_local(self) -> bool:
        """True when every task runs on the machine of the driver's JVM (on Connect: of the server)."""
        return (self.conf("spark.master") or "").startswith("local")

    @abc.abstractmethod
    def slots(self, profile: Any = None) -> SlotCounts:
        """The places for tasks, as far as this kind of session can tell without starting a job.

        Args:
            profile: the tasks' ``pyspark.resource.ResourceProfile``, if they have one.
        """

    @abc.abstractmethod
    def default_parallelism(self) -> int:
        """How many tasks the session runs at once by default. May start a small Spark job."""

    @abc.abstractmethod
    def ship(self, call: bytes) -> tuple[Any, Callable[[], None]]:
        """Bring ``call`` to where tasks can take it.

        Returns:
            what the task hands to :func:`hvd_cluster.spark.barrier.receive`, and a function that frees it afterwards.
        """

    def keep(self, content: bytes) -> Any:
        """What :meth:`ship` returns first, never freed; the same content is brought only once in a session's life."""
        return self.ship(content)[0]

    def thread(self, target: Callable[[], None], tag: str) -> threading.Thread:
        """A thread, not yet started, that runs ``target`` such that :meth:`cancel` with ``tag`` reaches its jobs."""
        return spark_jobs.thread(self.spark, target, tag, "Horovod Spark Run")

    def cancel(self, tag: str) -> None:
        """Cancel the jobs that run under ``tag``; a job that has not been submitted yet is not reached."""
        spark_jobs.cancel(self.spark, tag)

    @abc.abstractmethod
    def running_tasks(self, tag: str) -> int | None:
        """How many tasks of the jobs under ``tag`` run now; None when this session cannot tell."""

    @abc.abstractmethod
    def driver_hosts(self) -> tuple[str, list[str]]:
        """Where this process listens for its tasks.

        Returns:
            the address to listen on, and the names or addresses under which tasks may reach it, the likeliest first.
        """


def nothing_to_free() -> None:
    """What frees a call that :meth:`Session.ship` left as it was, or that the server keeps."""


def check_profile(session: Session, profile: Any) -> None:
    """Refuse a resource profile if this version of Spark does not support it.

    Raises:
        LaunchError: Spark is older than 4.0.
    """
    if profile is not None and not session.takes_profiles():
        raise LaunchError(
            f"resource_profile needs Spark 4.0 or newer, and this is {session.spark.version}: use the session's "
            "settings instead (spark.task.cpus, spark.task.resource.gpu.amount)"
        )
