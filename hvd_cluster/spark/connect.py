"""A Spark Connect session: a client without a JVM, perhaps of a remote server."""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hvd_cluster.rendezvous.sockets import ANY, LOOPBACK
from hvd_cluster.spark import host, slots
from hvd_cluster.spark.session import INLINE_BYTES, Session, nothing_to_free
from hvd_cluster.spark.slots import SlotCounts

#: The names of the artifacts on each session's server, which would accept a whole upload before refusing its name.
_uploaded: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()
_upload_lock = threading.Lock()


class ConnectSession(Session):
    """A Connect session, which cancels by tag.

    It knows the slots only from settings, and uploads large calls as artifacts.
    """

    def __init__(self, spark: Any) -> None:
        super().__init__(spark)
        self._running: dict[str, int] = {}

    def slots(self, profile: Any = None) -> SlotCounts:
        return slots.with_profile(slots.of_settings(self.conf), profile)

    def default_parallelism(self) -> int:
        known = self.slots().total
        if known is not None:
            return known
        # The only portable way: the number of partitions that Spark creates by default.
        frame = self.spark.range(1 << 16).selectExpr("spark_partition_id() AS partition").distinct()
        return int(frame.count())

    def ship(self, call: bytes) -> tuple[Any, Callable[[], None]]:
        if len(call) <= INLINE_BYTES:
            return call, nothing_to_free
        # Plans are limited to 128 MB and kept in the server's heap; artifacts are sent in chunks. The name has the
        # content's hash, because the server refuses a second upload of a name.
        name = f"hvd_call_{hashlib.sha256(call).hexdigest()[:32]}"
        with _upload_lock:
            known = _uploaded.setdefault(self.spark, set())
            if name not in known:
                self._upload(name, call)
                known.add(name)
        return name, nothing_to_free

    def _upload(self, name: str, call: bytes) -> None:
        with tempfile.TemporaryDirectory(prefix="hvd_call_") as folder:
            path = Path(folder) / name
            path.write_bytes(call)
            try:
                self.spark.addArtifacts(str(path), file=True)
            except Exception as error:  # of any class; the text names the condition
                if "ARTIFACT_ALREADY_EXISTS" not in str(error):
                    raise

    def thread(self, target: Callable[[], None], tag: str) -> threading.Thread:
        def run() -> None:
            with self._counting(tag):
                target()

        return super().thread(run, tag)

    def running_tasks(self, tag: str) -> int | None:
        return self._running.get(tag)

    @contextlib.contextmanager
    def _counting(self, tag: str) -> Iterator[None]:
        """Count this thread's running tasks, if the session reports them (Spark 4)."""
        if not hasattr(self.spark, "registerProgressHandler"):
            yield
            return
        owner = threading.get_ident()
        self._running[tag] = 0

        def handler(stages: Any, inflight_tasks: int, operation_id: Any, done: bool) -> None:
            del stages, operation_id, done
            if threading.get_ident() == owner:  # called for every query of the session, each in its own thread
                self._running[tag] = inflight_tasks

        self.spark.registerProgressHandler(handler)
        try:
            yield
        finally:
            self.spark.removeProgressHandler(handler)

    def driver_hosts(self) -> tuple[str, list[str]]:
        server = str(getattr(self.spark.client, "host", "") or "localhost")
        if self.is_local and server in ("localhost", "127.0.0.1", "::1"):
            return LOOPBACK, [LOOPBACK]
        return ANY, host.addresses(towards=[server])
