"""The workers of one barrier task, which are its child processes.

All tasks learn when a worker of any task has ended.
"""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from hvd_cluster.errors import WorldEndedError
from hvd_cluster.launch.outcome import ErrorReport, Outcome
from hvd_cluster.launch.placement import Placement
from hvd_cluster.launch.process import WorkerProcess
from hvd_cluster.launch.wire.messages import OutputLine, ProgressEvent
from hvd_cluster.launch.worker_group import FAILURE_GRACE_S, Callbacks
from hvd_cluster.rendezvous.client import KeyValueClient
from hvd_cluster.spark import messages
from hvd_cluster.spark.devices import task_environment
from hvd_cluster.spark.driver_connection import DriverConnection
from hvd_cluster.spark.host import resolve_executable
from hvd_cluster.spark.messages import TaskPlan
from hvd_cluster.topology import Topology, join_address

#: Seconds between SIGTERM and SIGKILL for a worker that must end.
_TERM_S = 2.0
_POLL_S = 0.1


class TaskWorkers:
    """Starts the workers of a task, and runs them to their end."""

    def __init__(
        self,
        topologies: Sequence[Topology],
        placements: Sequence[Placement],
        job: TaskPlan,
        call: bytes,
        driver: DriverConnection,
        env: Mapping[str, str],
    ) -> None:
        self._topologies = topologies
        self._placements = placements
        self._job = job
        self._call = call
        self._driver = driver
        self._env = dict(env)
        self._changed = threading.Event()
        self._workers: list[WorkerProcess] = []
        self._outcomes: dict[int, Outcome] = {}

    def run(self, end_tracker: EndTracker) -> list[Outcome]:
        """Run the workers until all have ended.

        Stop them if the driver asks, or soon after another worker's failure.

        Returns:
            Their outcomes, in order.

        Raises:
            WorldEndedError: the task of rank 0 is gone.
        """
        try:
            for topology, placement in zip(self._topologies, self._placements, strict=True):
                self._start(topology, placement, end_tracker)
            while self._take_ends(end_tracker):
                self._changed.wait(_POLL_S)
                self._changed.clear()
                if self._driver.stop_requested.is_set():
                    self._stop()
                elif time.monotonic() >= end_tracker.deadline_s():
                    for worker in self._workers:
                        if worker.outcome is None:
                            text = f"stopping {worker.place}, which still runs after the first failure"
                            self._driver.send(OutputLine(worker.rank, "stderr", text))
                            worker.write_stack()
                    self._stop()
        finally:
            for worker in self._workers:
                worker.kill()
        return [self._outcomes[topology.rank] for topology in self._topologies]

    def _start(self, topology: Topology, placement: Placement, end_tracker: EndTracker) -> None:
        send = self._driver.send
        env = {**self._env, **task_environment(placement.slot.gpus), **placement.device_env(), **self._job.env}
        try:
            worker = WorkerProcess(
                topology,
                self._call,
                Callbacks(
                    on_line=lambda rank, stream, text: send(OutputLine(rank, stream, text)),
                    on_event=lambda rank, fields: send(ProgressEvent(rank, fields)),
                    on_change=self._changed.set,
                ),
                env=env,
                executable=resolve_executable(self._job.executable),
                as_horovod=self._job.as_horovod,
            )
        except OSError as error:
            report = ErrorReport.of(error)
            self._end(Outcome(topology.rank, topology.host, error=report, finished_at=time.time()), end_tracker)
        else:
            self._workers.append(worker)

    def _take_ends(self, end_tracker: EndTracker) -> bool:
        """Handle the workers that have ended; returns False when all have."""
        for worker in self._workers:
            if worker.outcome is not None and worker.rank not in self._outcomes:
                outcome = worker.wait()
                assert outcome is not None
                self._end(outcome, end_tracker)
        return len(self._outcomes) < len(self._topologies)

    def _end(self, outcome: Outcome, end_tracker: EndTracker) -> None:
        self._outcomes[outcome.rank] = outcome
        self._driver.send(messages.WorkerEnded(replace(outcome, value=b"" if outcome.ok else None)))
        end_tracker.announce_end(outcome.rank, outcome.ok)

    def _stop(self) -> None:
        for worker in self._workers:
            worker.terminate()
        deadline_s = time.monotonic() + _TERM_S
        for worker in self._workers:
            if worker.wait(max(0.0, deadline_s - time.monotonic())) is None:
                worker.kill()
        for worker in self._workers:
            worker.wait()


_FAILED = "launch/failed"
_ENDED = "launch/ended/"
#: Seconds for connecting to the store at one of its addresses.
_REACH_S = 5.0
#: Seconds of one wait for the others' ends.
_WAIT_S = 1.0


class EndTracker:
    """Announces the ends of this task's workers, and watches those of the others."""

    def __init__(self, client: KeyValueClient, size: int) -> None:
        self._client = client
        self._size = size
        self._period_s = max(0.5, size / 500)  # one thread of rank 0's task answers all tasks
        self._next_look_s = 0.0
        self._deadline_s = math.inf

    def deadline_s(self) -> float:
        """The time (``time.monotonic``) by which this task's workers must have ended.

        Infinity until a worker has failed.
        """
        now_s = time.monotonic()
        if self._deadline_s == math.inf and now_s >= self._next_look_s:
            self._next_look_s = now_s + self._period_s
            if self._another_failed():
                self._deadline_s = now_s + FAILURE_GRACE_S
        return self._deadline_s

    def announce_end(self, rank: int, ok: bool) -> None:
        """Announce to all tasks that a worker of this one has ended.

        If it is not ``ok``, the others must end too.

        Raises:
            WorldEndedError: the task of rank 0, which has the store, is gone.
        """
        try:
            if not ok:
                self._client.set(_FAILED, b"")
            self._client.set(f"{_ENDED}{rank}", b"")
        except ConnectionError as error:
            raise WorldEndedError(
                f"the Spark task of rank 0, which has the job's key-value store, is gone: {error.__cause__ or error}"
            ) from error

    def wait_for_ends(self, give_up: Callable[[], bool]) -> None:
        """Wait until all workers' ends are announced, or ``give_up()`` is true."""
        keys = [f"{_ENDED}{rank}" for rank in range(self._size)]
        while not give_up():
            try:
                self._client.wait(keys, _WAIT_S)
                return
            except TimeoutError:
                continue

    def _another_failed(self) -> bool:
        try:
            return self._client.check([_FAILED])
        except ConnectionError:
            return True  # the task of rank 0 is gone


def reach(hosts: Sequence[str], port: int, secret: bytes) -> tuple[KeyValueClient, str]:
    """Connect to the job's key-value store.

    Returns a client, and the first address that answered.

    Raises:
        ConnectionError: no address answered.
    """
    errors: list[str] = []
    for one in hosts:
        try:
            # The store is already running, so a refusal is final; the client itself would keep trying.
            socket.create_connection((one, port), timeout=_REACH_S).close()
            return KeyValueClient(join_address(one, port), secret, _REACH_S), one
        except OSError as error:
            errors.append(f"{join_address(one, port)}: {error}")
    raise ConnectionError("the host of rank 0 cannot be reached: " + "; ".join(errors))
