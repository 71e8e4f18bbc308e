"""The operations of any Spark session that running workers needs.

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
from hvd_cluster.spark.slots import SlotCounts
from hvd_cluster.spark.task_function import SCHEMA, Rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: A packed call up to this size is sent inside the tasks; a larger one once per executor.
INLINE_BYTES = 1 << 20


class Session(abc.ABC):
    """A live session.

    Methods may be called from any thread unless they say otherwise.
    """

    def __init__(self, spark: Any) -> None:
        #: The user's ``SparkSession``.
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
            function: what :func:`hvd_cluster.spark.task_function.task_for` returned.
            barrier: whether all start together or none does.
            profile: their ``pyspark.resource.ResourceProfile``; None for the session's settings.
            rows: what the tasks read; None for nothing.
        """
        spark_jobs.use_this_python(self.spark)
        frame: DataFrame = self.spark.range(0, count, 1, count) if rows is None else rows.for_tasks(count)
        more = {} if profile is None else {"profile": profile}
        found: list[Any] = frame.mapInArrow(function, SCHEMA, barrier=barrier, **more).collect()
        return found

    def takes_profiles(self) -> bool:
        """Whether a DataFrame's tasks may have resource profiles, as in Spark 4.0."""
        return "profile" in inspect.signature(type(self.spark.range(0)).mapInArrow).parameters

    def conf(self, name: str) -> str | None:
        """A setting of the session, or None if it is not set."""
        try:
            value = self.spark.conf.get(name, None)
        except Exception as error:  # of any class; the text names the condition
            if "CONFIG_NOT_AVAILABLE" not in str(error):
                raise
            return None  # a serverless cluster hides its settings
        return None if value is None else str(value)

    @property
    def is_local(self) -> bool:
        """Whether every task runs on the machine of the driver's JVM.

        On Connect: on that of the server.
        """
        return (self.conf("spark.master") or "").startswith("local")

    @abc.abstractmethod
    def slots(self, profile: Any = None) -> SlotCounts:
        """The slots for tasks, as far as they are known without starting a job."""

    @abc.abstractmethod
    def default_parallelism(self) -> int:
        """The number of tasks that the session runs at once by default.

        May start a small Spark job.
        """

    @abc.abstractmethod
    def ship(self, call: bytes) -> tuple[Any, Callable[[], None]]:
        """Send ``call`` to where tasks can read it.

        Returns:
            The argument for :func:`hvd_cluster.spark.barrier.receive`, and a function that frees it afterwards.
        """

    def keep(self, content: bytes) -> Any:
        """The first value that :meth:`ship` returns, never freed.

        The same content is sent only once per session.
        """
        return self.ship(content)[0]

    def thread(self, target: Callable[[], None], tag: str) -> threading.Thread:
        """A thread, not yet started, whose jobs :meth:`cancel` with a tag cancels."""
        return spark_jobs.thread(self.spark, target, tag, "Horovod Spark Run")

    def cancel(self, tag: str) -> None:
        """Cancel the jobs that run under a tag.

        A job that has not been submitted yet is not cancelled.
        """
        spark_jobs.cancel(self.spark, tag)

    @abc.abstractmethod
    def running_tasks(self, tag: str) -> int | None:
        """The number of running tasks of a tag's jobs; None if it is not known."""

    @abc.abstractmethod
    def driver_hosts(self) -> tuple[str, list[str]]:
        """Where this process listens for its tasks.

        Returns:
            The address to listen on; and the names or addresses at which tasks may reach it, the most likely first.
        """


def nothing_to_free() -> None:
    """Do nothing, for a call that :meth:`Session.ship` left to the server or as is."""


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
