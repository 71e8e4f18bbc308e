"""The tasks of an elastic job that offer themselves for workers."""

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

from hvd_cluster.data import spark_jobs
from hvd_cluster.errors import LaunchError, StartTimeoutError
from hvd_cluster.launch.elastic.discovery import HostDiscovery
from hvd_cluster.launch.hosts import Host
from hvd_cluster.launch.remote import RemoteHost
from hvd_cluster.launch.wire.agent_messages import AgentHandshake
from hvd_cluster.launch.wire.listener import listen_for_handshakes
from hvd_cluster.rendezvous.channel import Channel
from hvd_cluster.spark import preflight, task
from hvd_cluster.spark.elastic.agent_task import ElasticTaskPlan
from hvd_cluster.spark.elastic.failures import DEFAULT_MAX_FAILURES
from hvd_cluster.spark.plan import Versions
from hvd_cluster.spark.progress import short_reason
from hvd_cluster.spark.session import Session
from hvd_cluster.topology import join_address

logger = logging.getLogger(__name__)

#: Seconds until a slot whose task has ended gets another one.
_RETRY_S = 0.5
#: The same where tasks end as soon as they have begun: twice as long each time, up to this.
_LONGEST_PAUSE_S = 30.0
#: A task that has lived so long, in seconds, was no vain attempt.
_LIVED_S = 10.0
_EXPLAIN_S = 10.0
_LEAVE_S = 3.0


class TaskPool(HostDiscovery):
    """Keeps tasks on plan, each a Spark job of its own: one that ends is followed by another.

    Not the tasks of one stage: Spark gives a stage up, and kills all of it, when one task has failed too often, on a
    local master once; and a barrier stage stands and falls as a whole anyway.

    Args:
        session: where they run.
        num_tasks: how many at once, of which some may wait for room.
        secret: the job's secret.
        profile: their resource profile; None for what the session's settings say.
        on_change: called, from another thread, when a task has come or gone.
        interfaces: names, or beginnings of names, of the network interfaces that the tasks are to use.
        max_failures: so many tasks of a slot that end at once, before any has called, will not do better later.
    """

    def __init__(
        self,
        session: Session,
        num_tasks: int,
        secret: bytes,
        profile: Any,
        on_change: Callable[[], None],
        interfaces: tuple[str, ...] = (),
        max_failures: int = DEFAULT_MAX_FAILURES,
    ) -> None:
        self._session = session
        self._num_tasks = num_tasks
        self._profile = profile
        self._max_failures = max_failures
        self._on_change = on_change
        self._tag = f"horovod.spark.run.{uuid.uuid4().hex[:12]}"
        self._changed = threading.Condition()
        self._remotes: dict[str, RemoteHost] = {}
        self._gone: list[RemoteHost] = []
        self._problems: list[str] = []
        self._has_called = False
        #: Why Spark has lost a task, the last time.
        self._reason = ""
        self._closing = threading.Event()
        self._num_threads = 0
        bind, hosts = session.driver_hosts()
        self._listener = listen_for_handshakes(secret, self._let_in, [bind])
        addresses = tuple(join_address(host, self._listener.port) for host in hosts)
        self._versions = Versions.here()
        self._plan = pickle.dumps(
            ElasticTaskPlan(secret=secret, driver_addresses=addresses, versions=self._versions, interfaces=interfaces)
        )

    def start(self) -> None:
        """Put the tasks on plan."""
        for slot in range(self._num_tasks):
            thread = self._session.thread(functools.partial(self._keep, slot), self._tag)
            with self._changed:
                self._num_threads += 1
            thread.start()

    def wait_for(self, count: int, timeout_s: float) -> None:
        """Return when ``count`` tasks run.

        Raises:
            StartTimeoutError: they do not after ``timeout_s`` seconds.
            LaunchError: tasks run, but are of no use.
        """
        began_s = time.monotonic()
        explain_s = began_s + _EXPLAIN_S
        while True:
            with self._changed:
                self._changed.wait_for(lambda: len(self._present()) >= count or bool(self._problems), 0.2)
                if self._problems:
                    texts = list(dict.fromkeys(self._problems))
                    raise LaunchError("the workers cannot start: " + "; ".join(texts[:5]))
                if len(self._present()) >= count:
                    return
            now_s = time.monotonic()
            if now_s >= began_s + timeout_s:
                raise StartTimeoutError(preflight.timeout_text(self._waits_for(count), timeout_s))
            if now_s >= explain_s:
                explain_s = now_s + 10 * _EXPLAIN_S
                logger.warning("still waiting for Spark to start the workers: %s", self._waits_for(count))

    def find_available_hosts_and_slots(self) -> Mapping[str, int]:
        """The tasks that run, one slot each."""
        with self._changed:
            return dict.fromkeys(self._present(), 1)

    def _present(self) -> list[str]:
        """The tasks that can take a worker: those whose words have arrived, which comes a moment after their call."""
        return [name for name, remote in self._remotes.items() if remote.handshake is not None and not remote.gone]

    def remote(self, name: str) -> RemoteHost | None:
        """The connection to a task; None where it has gone."""
        with self._changed:
            return self._remotes.get(name)

    def release(self, name: str) -> None:
        """Let a task end: its worker has ended. Another one follows it."""
        with self._changed:
            remote = self._remotes.pop(name, None)
            if remote is not None:
                self._gone.append(remote)
        if remote is not None:
            remote.request_end()

    def close(self) -> None:
        """End all tasks, also those that have not begun, and follow them with no others."""
        self._closing.set()
        with self._changed:
            for remote in self._remotes.values():
                remote.request_end()
            self._changed.wait_for(lambda: not self._remotes, _LEAVE_S)
        spark_jobs.cancel_until(self._ended, functools.partial(self._session.cancel, self._tag))
        self._listener.close()
        for remote in [*self._remotes.values(), *self._gone]:
            remote.close(time.monotonic())

    def _ended(self, timeout_s: float) -> bool:
        """Whether no task runs or waits any more, by ``timeout_s`` seconds from now."""
        with self._changed:
            return self._changed.wait_for(lambda: self._num_threads == 0, timeout_s)

    def _keep(self, slot: int) -> None:
        """Runs in a thread for each slot: one task after the other."""
        function = task.task_for(
            "hvd_cluster.spark.elastic.agent_task", (asdict(self._versions), self._plan, slot), barrier=False
        )
        pause_s, num_vain = 0.0, 0
        try:
            while not self._closing.wait(pause_s):
                began_s = time.monotonic()
                problem = self._run_one(function)
                is_vain = bool(problem) and time.monotonic() - began_s < _LIVED_S
                num_vain = num_vain + 1 if is_vain else 0
                if num_vain == self._max_failures:
                    self._give_up()
                pause_s = min(2 * max(pause_s, _RETRY_S), _LONGEST_PAUSE_S) if is_vain else _RETRY_S
        finally:
            with self._changed:
                self._num_threads -= 1
                self._changed.notify_all()

    def _run_one(self, function: Callable[..., Any]) -> str:
        """One task from its beginning to its end; says why it was of no use, if so."""
        try:
            problems = task.problems(self._session.run_tasks(1, function, barrier=False, profile=self._profile))
        except Exception as error:  # noqa: BLE001  whatever Spark raises: it has lost the task, and gets another chance
            if self._closing.is_set():
                return ""
            reason = short_reason(error)
            logger.warning("a task of the elastic job was lost: %s", reason)
            with self._changed:
                self._reason = reason
            return "lost"
        if problems and not self._closing.is_set():
            logger.warning("a task of the elastic job is of no use: %s", "; ".join(problems))
            with self._changed:
                self._problems += problems
                self._changed.notify_all()
        return "; ".join(problems)

    def _give_up(self) -> None:
        """Tasks of a slot have ended at once too often: before any other has done better, none will."""
        with self._changed:
            if self._reason and not self._has_called:
                self._problems.append(
                    f"Spark could not run {self._max_failures} tasks in a row (spark.task.maxFailures). Spark says: "
                    f"{self._reason}"
                )
                self._changed.notify_all()

    def _let_in(self, handshake: AgentHandshake, channel: Channel) -> bool:
        """Runs in a thread of the listener: a task has connected."""
        remote = RemoteHost(Host(handshake.name, 1), self._notice)
        with self._changed:
            if self._closing.is_set():
                return False
            self._remotes[handshake.name] = remote
            self._has_called = True
        remote.attach(handshake, channel)
        logger.info("a task on %s offers itself", handshake.hostname)
        return True

    def _notice(self) -> None:
        """A task has come or gone; called without our lock, for the one that has changed holds its own."""
        with self._changed:
            for name in [name for name, remote in self._remotes.items() if remote.gone]:
                self._gone.append(self._remotes.pop(name))
            self._changed.notify_all()
        self._on_change()

    def _waits_for(self, count: int) -> str:
        with self._changed:
            present, reason = len(self._present()), self._reason
        lost = f"; a task was lost, and Spark says: {reason}" if reason else ""
        return f"{self._session.slots(self._profile).describe(count)}; {present} of {count} tasks have reported{lost}"
