"""The tasks of an elastic job that can run workers."""

from __future__ import annotations

import functools
import logging
import pickle
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from hvd_cluster.data.cancelling import cancel_until
from hvd_cluster.errors import LaunchError, StartTimeoutError
from hvd_cluster.launch.elastic.discovery import HostDiscovery
from hvd_cluster.launch.hosts import Host
from hvd_cluster.launch.remote import RemoteHost
from hvd_cluster.launch.wire.agent_messages import AgentHandshake
from hvd_cluster.launch.wire.listener import listen_for_handshakes
from hvd_cluster.rendezvous.channel import Channel
from hvd_cluster.spark import preflight, task_function
from hvd_cluster.spark.elastic.agent_task import ElasticTaskPlan
from hvd_cluster.spark.elastic.failures import DEFAULT_MAX_FAILURES
from hvd_cluster.spark.messages import Versions
from hvd_cluster.spark.progress import short_reason
from hvd_cluster.spark.session import Session
from hvd_cluster.topology import join_address

logger = logging.getLogger(__name__)

#: Seconds until a slot whose task has ended gets another one.
_RETRY_S = 0.5
#: The maximum of that time; it doubles each time that a task ends right after its start.
_MAX_PAUSE_S = 30.0
#: A task that has lived this long, in seconds, did not fail at its start.
_LIVED_S = 10.0
_EXPLAIN_S = 10.0
_END_S = 3.0


class TaskPool(HostDiscovery):
    """Keeps a number of tasks running, each as a Spark job of its own.

    A task that ends is followed by another. They are not tasks of one stage, because Spark gives up a stage and kills
    all of it when one task has failed too often, on a local master once; and a barrier stage always fails as a whole.

    Args:
        num_tasks: how many tasks at once, some of which may wait for free slots.
        profile: their resource profile; None for the session's settings.
        interfaces: names, or prefixes of names, of the network interfaces that the tasks should use.
        max_failures: if this many tasks of a slot end at once before any has connected, the job fails.
    """

    def __init__(
        self,
        session: Session,
        num_tasks: int,
        secret: bytes,
        profile: Any,
        interfaces: tuple[str, ...] = (),
        max_failures: int = DEFAULT_MAX_FAILURES,
    ) -> None:
        self._session = session
        self._num_tasks = num_tasks
        self._profile = profile
        self._max_failures = max_failures
        #: Called, from another thread, when a task has connected or ended.
        self.on_change: Callable[[], None] = lambda: None
        self._tag = f"horovod.spark.run.{uuid.uuid4().hex[:12]}"
        self._changed = threading.Condition()
        self._remotes: dict[str, RemoteHost] = {}
        self._gone: list[RemoteHost] = []
        self._problems: list[str] = []
        self._has_connected = False
        #: Why Spark has lost a task, the last time.
        self._reason = ""
        self._closing = threading.Event()
        self._num_threads = 0
        bind, hosts = session.driver_hosts()
        self._listener = listen_for_handshakes(secret, self._accept, [bind])
        addresses = tuple(join_address(host, self._listener.port) for host in hosts)
        self._versions = Versions.here()
        self._plan = pickle.dumps(
            ElasticTaskPlan(secret=secret, driver_addresses=addresses, versions=self._versions, interfaces=interfaces)
        )

    def start(self) -> None:
        """Start the tasks."""
        for slot in range(self._num_tasks):
            thread = self._session.thread(functools.partial(self._run_slot, slot), self._tag)
            with self._changed:
                self._num_threads += 1
            thread.start()

    def wait_for(self, count: int, timeout_s: float) -> None:
        """Return when ``count`` tasks are running.

        Raises:
            StartTimeoutError: they are not after ``timeout_s`` seconds.
            LaunchError: tasks run but cannot be used.
        """
        began_s = time.monotonic()
        explain_s = began_s + _EXPLAIN_S
        while True:
            with self._changed:
                self._changed.wait_for(lambda: len(self._usable()) >= count or bool(self._problems), 0.2)
                if self._problems:
                    texts = list(dict.fromkeys(self._problems))
                    raise LaunchError("the workers cannot start: " + "; ".join(texts[:5]))
                if len(self._usable()) >= count:
                    return
            now_s = time.monotonic()
            if now_s >= began_s + timeout_s:
                raise StartTimeoutError(preflight.timeout_text(self._waits_for(count), timeout_s))
            if now_s >= explain_s:
                explain_s = now_s + 10 * _EXPLAIN_S
                logger.warning("still waiting for Spark to start the workers: %s", self._waits_for(count))

    def find_available_hosts_and_slots(self) -> Mapping[str, int]:
        """The running tasks, one slot each."""
        with self._changed:
            return dict.fromkeys(self._usable(), 1)

    def _usable(self) -> list[str]:
        """The tasks that can run a worker: those whose handshake has arrived."""
        return [name for name, remote in self._remotes.items() if remote.handshake is not None and not remote.gone]

    def remote(self, name: str) -> RemoteHost | None:
        """The connection to a task; None if it is gone."""
        with self._changed:
            return self._remotes.get(name)

    def release(self, name: str) -> None:
        """Let a task end because its worker has ended. Another task follows it."""
        with self._changed:
            remote = self._remotes.pop(name, None)
            if remote is not None:
                self._gone.append(remote)
        if remote is not None:
            remote.request_end()

    def close(self) -> None:
        """End all tasks, including those that have not started, without replacing them."""
        self._closing.set()
        with self._changed:
            for remote in self._remotes.values():
                remote.request_end()
            self._changed.wait_for(lambda: not self._remotes, _END_S)
        cancel_until(self._ended, functools.partial(self._session.cancel, self._tag))
        self._listener.close()
        for remote in [*self._remotes.values(), *self._gone]:
            remote.close(time.monotonic())

    def _ended(self, timeout_s: float) -> bool:
        """Whether all tasks have ended within ``timeout_s`` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._num_threads == 0, timeout_s)

    def _run_slot(self, slot: int) -> None:
        """Run one task after the other in a slot; runs in a thread for each slot."""
        function = task_function.task_for(
            "hvd_cluster.spark.elastic.agent_task", (asdict(self._versions), self._plan, slot), barrier=False
        )
        pause_s, num_early_ends = 0.0, 0
        try:
            while not self._closing.wait(pause_s):
                began_s = time.monotonic()
                problem = self._run_one(function)
                ended_early = bool(problem) and time.monotonic() - began_s < _LIVED_S
                num_early_ends = num_early_ends + 1 if ended_early else 0
                if num_early_ends == self._max_failures:
                    self._give_up()
                pause_s = min(2 * max(pause_s, _RETRY_S), _MAX_PAUSE_S) if ended_early else _RETRY_S
        finally:
            with self._changed:
                self._num_threads -= 1
                self._changed.notify_all()

    def _run_one(self, function: Callable[..., Any]) -> str:
        """Run one task to its end; returns why it could not be used, or an empty string."""
        try:
            problems = task_function.problems(
                self._session.run_tasks(1, function, barrier=False, profile=self._profile)
            )
        except Exception as error:  # noqa: BLE001  of any kind: Spark has lost the task, and another one is started
            if self._closing.is_set():
                return ""
            reason = short_reason(error)
            logger.warning("a task of the elastic job was lost: %s", reason)
            with self._changed:
                self._reason = reason
            return "lost"
        if problems and not self._closing.is_set():
            logger.warning("a task of the elastic job cannot be used: %s", "; ".join(problems))
            with self._changed:
                self._problems += problems
                self._changed.notify_all()
        return "; ".join(problems)

    def _give_up(self) -> None:
        """Fail the job, unless another task has connected.

        Tasks of a slot have ended at once too often.
        """
        with self._changed:
            if self._reason and not self._has_connected:
                self._problems.append(
                    f"Spark could not run {self._max_failures} tasks in a row (spark.task.maxFailures). Spark says: "
                    f"{self._reason}"
                )
                self._changed.notify_all()

    def _accept(self, handshake: AgentHandshake, channel: Channel) -> bool:
        """A task has connected; runs in a thread of the listener."""
        remote = RemoteHost(Host(handshake.name, 1), self._on_remote_change)
        with self._changed:
            if self._closing.is_set():
                return False
            self._remotes[handshake.name] = remote
            self._has_connected = True
        remote.attach(handshake, channel)
        logger.info("a task on %s has connected", handshake.hostname)
        return True

    def _on_remote_change(self) -> None:
        """React to a task that has connected or is gone.

        Called without our lock, because the caller holds that of the connection.
        """
        with self._changed:
            for name in [name for name, remote in self._remotes.items() if remote.gone]:
                self._gone.append(self._remotes.pop(name))
            self._changed.notify_all()
        self.on_change()

    def _waits_for(self, count: int) -> str:
        with self._changed:
            present, reason = len(self._usable()), self._reason
        lost = f"; a task was lost, and Spark says: {reason}" if reason else ""
        slots = self._session.slots(self._profile).describe_wait(count)
        return f"{slots}; {present} of {count} tasks have reported{lost}"
