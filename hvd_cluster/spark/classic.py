"""A classic session: the driver has its own JVM and a SparkContext."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import threading
from collections.abc import Callable
from typing import Any

from hvd_cluster.data import spark_jobs
from hvd_cluster.spark import host, slots
from hvd_cluster.spark.session import INLINE_BYTES, Session, nothing_to_free
from hvd_cluster.spark.slots import SlotCounts

logger = logging.getLogger(__name__)

#: The context that the broadcasts of :meth:`ClassicSession.keep` belong to, and they by the hash of their content.
_kept: tuple[Any, dict[bytes, Any]] = (None, {})
_keep_lock = threading.Lock()


class ClassicSession(Session):
    """Cancels by job group; reads the exact number of slots where Spark's private methods still offer it."""

    @staticmethod
    def find() -> Any:
        """The active session of this process, or None."""
        from pyspark import SparkContext
        from pyspark.sql import SparkSession

        if SparkContext._active_spark_context is None:
            return None
        return SparkSession.getActiveSession() or SparkSession.builder.getOrCreate()

    @property
    def _context(self) -> Any:
        return self.spark.sparkContext

    def conf(self, name: str) -> str | None:
        value = self._context.getConf().get(name)
        return None if value is None else str(value)

    def slots(self, profile: Any = None) -> SlotCounts:
        told = slots.with_profile(slots.of_settings(self.conf), profile)
        try:
            scala = self._context._jsc.sc()
            manager = scala.resourceProfileManager()
            wanted = None if profile is None else profile._java_resource_profile
            if profile is None or wanted is not None:
                total = int(scala.maxNumConcurrentTasks(wanted or manager.defaultResourceProfile()))
            else:  # made before the session: Spark has not seen it yet
                return told
            # The driver is in the list too, and runs the tasks itself only in local mode.
            busy = sum(int(executor.numRunningTasks()) for executor in scala.statusTracker().getExecutorInfos())
        except Exception as error:  # noqa: BLE001  private to Spark: py4j raises what it likes when it has moved
            logger.debug("the exact number of slots is not to be had here: %s", error)
            return dataclasses.replace(told, total=self._context.defaultParallelism if profile is None else None)
        if told.max_total is None and profile is None and told.master.startswith("local"):
            told = dataclasses.replace(told, max_total=total)  # local[*]
        return slots.with_total(told, total, busy)

    def default_parallelism(self) -> int:
        return int(self._context.defaultParallelism)

    def ship(self, call: bytes) -> tuple[Any, Callable[[], None]]:
        if len(call) <= INLINE_BYTES:
            return call, nothing_to_free
        broadcast = self._context.broadcast(call)

        def free() -> None:
            with contextlib.suppress(Exception):  # the context may have been stopped meanwhile
                broadcast.destroy()

        return broadcast, free

    def keep(self, content: bytes) -> Any:
        global _kept
        if len(content) <= INLINE_BYTES:
            return content
        digest = hashlib.sha256(content).digest()
        with _keep_lock:
            if _kept[0] is not self._context:  # a process has one at a time
                _kept = (self._context, {})
            if digest not in _kept[1]:  # each is a file in the driver's temporary folder until its context ends
                _kept[1][digest] = self._context.broadcast(content)
            return _kept[1][digest]

    def running_tasks(self, tag: str) -> int | None:
        return spark_jobs.running_tasks(self.spark, tag)

    def url_of(self, path: str) -> str:
        """``path`` with scheme and host, on the default filesystem if it has neither; as given if Spark hides that."""
        try:
            java = self._context._jvm.org.apache.hadoop.fs.Path(path)
            filesystem = java.getFileSystem(self._context._jsc.hadoopConfiguration())
            scheme, _, rest = str(filesystem.makeQualified(java).toString()).partition(":")
            return f"{scheme}:{rest}" if rest.startswith("//") else f"{scheme}://{rest}"
        except Exception as error:  # noqa: BLE001  private to Spark, and a scheme may be one that Java does not know
            logger.debug("what %s means to Spark is not to be had here: %s", path, error)
            return path

    def driver_hosts(self) -> tuple[str, list[str]]:
        if self.is_local:
            return host.LOOPBACK, [host.LOOPBACK]
        # What the executors reach the driver's JVM by, they reach this process by.
        known = [name for name in (self.conf("spark.driver.host"),) if name]
        return self.conf("spark.driver.bindAddress") or host.ANY, host.addresses(known)
