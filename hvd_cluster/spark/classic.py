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
from hvd_cluster.rendezvous.sockets import ANY, LOOPBACK
from hvd_cluster.spark import host, slots
from hvd_cluster.spark.session import INLINE_BYTES, Session, nothing_to_free
from hvd_cluster.spark.slots import SlotCounts

logger = logging.getLogger(__name__)

#: The context that the broadcasts of :meth:`ClassicSession.keep` belong to, and the broadcasts by hash of their
#: content.
_kept: tuple[Any, dict[bytes, Any]] = (None, {})
_keep_lock = threading.Lock()


class ClassicSession(Session):
    """A classic session, which cancels by job group.

    It knows the exact number of slots where Spark's private methods provide it.
    """

    @property
    def _context(self) -> Any:
        return self.spark.sparkContext

    def conf(self, name: str) -> str | None:
        value = self._context.getConf().get(name)
        return None if value is None else str(value)

    def slots(self, profile: Any = None) -> SlotCounts:
        known = slots.with_profile(slots.of_settings(self.conf), profile)
        try:
            scala = self._context._jsc.sc()
            manager = scala.resourceProfileManager()
            wanted = None if profile is None else profile._java_resource_profile
            if profile is None or wanted is not None:
                total = int(scala.maxNumConcurrentTasks(wanted or manager.defaultResourceProfile()))
            else:  # created before the session, so Spark does not know it yet
                return known
            # The list includes the driver, which runs tasks itself only in local mode.
            busy = sum(int(executor.numRunningTasks()) for executor in scala.statusTracker().getExecutorInfos())
        except Exception as error:  # noqa: BLE001  private to Spark: py4j may raise anything if it has changed
            logger.debug("the exact number of slots is not available: %s", error)
            return dataclasses.replace(known, total=self._context.defaultParallelism if profile is None else None)
        if known.max_total is None and profile is None and known.master.startswith("local"):
            known = dataclasses.replace(known, max_total=total)  # local[*]
        return slots.with_total(known, total, busy)

    def default_parallelism(self) -> int:
        return int(self._context.defaultParallelism)

    def ship(self, call: bytes) -> tuple[Any, Callable[[], None]]:
        if len(call) <= INLINE_BYTES:
            return call, nothing_to_free
        broadcast = self._context.broadcast(call)

        def free() -> None:
            with contextlib.suppress(Exception):  # the context may have been stopped
                broadcast.destroy()

        return broadcast, free

    def keep(self, content: bytes) -> Any:
        global _kept
        if len(content) <= INLINE_BYTES:
            return content
        digest = hashlib.sha256(content).digest()
        with _keep_lock:
            if _kept[0] is not self._context:  # a process has one context at a time
                _kept = (self._context, {})
            if digest not in _kept[1]:  # each is a file in the driver's temporary directory until the context ends
                _kept[1][digest] = self._context.broadcast(content)
            return _kept[1][digest]

    def running_tasks(self, tag: str) -> int | None:
        return spark_jobs.running_tasks(self.spark, tag)

    def url_of(self, path: str) -> str:
        """A path with scheme and host, on the default filesystem if it has neither.

        Unchanged if Spark hides them.
        """
        try:
            java = self._context._jvm.org.apache.hadoop.fs.Path(path)
            filesystem = java.getFileSystem(self._context._jsc.hadoopConfiguration())
            scheme, _, rest = str(filesystem.makeQualified(java).toString()).partition(":")
            return f"{scheme}:{rest}" if rest.startswith("//") else f"{scheme}://{rest}"
        except Exception as error:  # noqa: BLE001  private to Spark, and Java may not know the scheme
            logger.debug("Spark does not resolve %s: %s", path, error)
            return path

    def driver_hosts(self) -> tuple[str, list[str]]:
        if self.is_local:
            return LOOPBACK, [LOOPBACK]
        # Executors reach this process by the same name as the driver's JVM.
        known = [name for name in (self.conf("spark.driver.host"),) if name]
        return host.without_brackets(self.conf("spark.driver.bindAddress") or ANY), host.addresses(known)
