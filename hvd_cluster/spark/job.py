"""A Spark job of barrier tasks that run workers, as its driver sees it.

The driver starts it, receives messages, waits and cancels.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import pickle
import queue
import threading
import time
import uuid
from dataclasses import asdict
from typing import Any

from hvd_cluster.data.cancelling import cancel_until
from hvd_cluster.errors import LaunchError, StartTimeoutError
from hvd_cluster.launch.outcome import Outcome
from hvd_cluster.launch.run_options import RunOptions
from hvd_cluster.launch.wire.messages import OutputLine, ProgressEvent
from hvd_cluster.launch.worker_group import passing_on
from hvd_cluster.oldpaths.shim import serves_horovod
from hvd_cluster.rendezvous.secret import new_secret
from hvd_cluster.spark import encryption, messages, preflight, task_function
from hvd_cluster.spark.message_server import MessageServer
from hvd_cluster.spark.messages import TaskPlan, Versions, verify
from hvd_cluster.spark.progress import Progress, short_reason
from hvd_cluster.spark.session import Session
from hvd_cluster.spark.task_function import Rows

logger = logging.getLogger(__name__)

#: Seconds after which a job that has not started logs what it waits for; then again at ten times that interval.
_EXPLAIN_S = 10.0
#: Seconds for the tasks to end and their last lines to arrive after the job has ended or failed.
_DRAIN_S = 6.0
_DONE = object()


class Job:
    """Runs a packed call on some tasks, with the same number of workers in each.

    Args:
        options: the options of the run; their callbacks are called in the calling thread.
        profile: the tasks' resource profile; None for the session's settings.
        rows: what the tasks get before their workers start; None for nothing.
    """

    def __init__(
        self,
        session: Session,
        num_tasks: int,
        options: RunOptions,
        *,
        workers_per_task: int = 1,
        profile: Any = None,
        rows: Rows | None = None,
    ) -> None:
        self._session = session
        self._input = rows
        self._num_tasks = num_tasks
        self._workers_per_task = workers_per_task
        self._profile = profile
        self._options = options
        self._callbacks = options.callbacks()
        self._secret = new_secret(encrypted=encryption.is_wanted(session.conf))
        self._id = uuid.uuid4().hex[:12]
        self._tag = f"horovod.spark.run.{self._id}"
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._progress = Progress(num_tasks)
        self._finished = threading.Event()
        self._rows: list[Any] = []
        self._error: BaseException | None = None

    def run(self, call: bytes, start_timeout_s: float) -> list[Outcome]:
        """Run ``call`` on every worker.

        Returns:
            One outcome per worker, in any order.

        Raises:
            StartTimeoutError: not every task runs after ``start_timeout_s`` seconds, without the time in which rows are
                computed.
            WorkerFailedError: Spark lost a task.
            LaunchError: the tasks run but cannot work together, or Spark refused the job.
        """
        bind, hosts = self._session.driver_hosts()
        shipped, free = self._session.ship(call)
        try:
            with MessageServer(self._secret, bind, self._messages) as server:
                thread = self._prepare(shipped, server.addresses(hosts))
                try:
                    thread.start()
                    self._wait(start_timeout_s)
                    if self._error is not None:
                        self._handle_last(server)
                    else:
                        server.drain(_DRAIN_S)
                        self._handle_all()
                finally:
                    if thread.is_alive():
                        self._stop(server)
                thread.join()
        finally:
            free()
        if self._error is not None:
            logger.debug("the Spark job failed", exc_info=self._error)
            raise self._progress.failure(short_reason(self._error))
        return self._outcomes()

    def _prepare(self, shipped: Any, addresses: tuple[str, ...]) -> threading.Thread:
        """A thread, not yet started, that submits the Spark job and waits for its rows."""
        versions = Versions.here()
        plan = TaskPlan(
            workers_per_task=self._workers_per_task,
            job_id=self._id,
            secret=self._secret,
            driver_addresses=addresses,
            env=self._options.variables,
            executable=self._options.executable,
            as_horovod=serves_horovod(),
            versions=versions,
        )
        function = task_function.task_for(
            "hvd_cluster.spark.barrier",
            (asdict(versions), pickle.dumps(plan), shipped),
            barrier=True,
            receiver="" if self._input is None else self._input.receiver,
        )

        def submit() -> None:
            try:
                self._rows = self._session.run_tasks(
                    self._num_tasks, function, barrier=True, profile=self._profile, rows=self._input
                )
            except BaseException as error:  # noqa: BLE001  handled in the calling thread
                self._error = error
            finally:
                self._finished.set()
                self._messages.put(_DONE)

        return self._session.thread(submit, self._tag)

    def _wait(self, start_timeout_s: float) -> None:
        """Handle the tasks' messages until the job has ended."""
        began_s = time.monotonic()
        explain_s = began_s + _EXPLAIN_S
        started = False
        while not self._finished.is_set():
            # A queue, not Thread.join(timeout): after an interrupt a second join returns at once (Python 3.11).
            with contextlib.suppress(queue.Empty):
                self._handle(self._messages.get(timeout=0.2))
            if started:
                continue
            now_s, running = time.monotonic(), self._session.running_tasks(self._tag)
            # The tasks that compute the rows come first, and there may be as many of them.
            started = self._progress.started or (self._input is None and (running or 0) >= self._num_tasks)
            if not started and running:  # rows are being computed: the timeout starts when no task runs
                began_s, explain_s = now_s, now_s + _EXPLAIN_S
            if not started and now_s >= began_s + start_timeout_s:
                if not self._would_know():
                    logger.warning("no task has connected to this process; tasks may have started all the same")
                    started = True
                    continue
                raise StartTimeoutError(preflight.timeout_text(self._waits_for(), start_timeout_s))
            if not started and now_s >= explain_s:
                explain_s = now_s + 10 * _EXPLAIN_S
                logger.warning("still waiting for Spark to start the workers: %s", self._waits_for())

    def _would_know(self) -> bool:
        """Whether the silence of the tasks means that they have not started."""
        return bool(self._progress.host_of_task) or self._session.running_tasks(self._tag) is not None

    def _waits_for(self) -> str:
        seen = self._progress.host_of_task
        where = f"; {len(seen)} of {self._num_tasks} tasks have reported" if seen else ""
        return self._session.slots(self._profile).describe_wait(self._num_tasks) + where

    def _handle(self, message: Any) -> None:
        if message is _DONE:
            return
        if isinstance(message, OutputLine):
            with passing_on(message.key):
                self._callbacks.on_line(message.key, message.stream, message.text)
        elif isinstance(message, ProgressEvent):
            with passing_on(message.key):
                self._callbacks.on_event(message.key, message.fields)
        elif isinstance(message, messages.TaskWarning):
            logger.warning("%s", message.text)
        else:
            self._progress.handle(message)

    def _handle_all(self) -> None:
        while True:
            try:
                self._handle(self._messages.get_nowait())
            except queue.Empty:
                return

    def _handle_last(self, server: MessageServer) -> None:
        """Find out which task was lost first, then stop the others.

        Spark has given up; the tasks' messages are handled.
        """
        deadline_s = time.monotonic() + 1.0
        while self._progress.host_of_task and not self._progress.lost and time.monotonic() < deadline_s:
            with contextlib.suppress(queue.Empty):
                self._handle(self._messages.get(timeout=0.1))
        server.stop_tasks()
        server.drain(_DRAIN_S)
        self._handle_all()

    def _stop(self, server: MessageServer) -> None:
        """Stop all tasks, whatever the reason."""
        if self._finished.is_set():
            return
        server.stop_tasks()
        if cancel_until(self._finished.wait, functools.partial(self._session.cancel, self._tag)):
            server.drain(_DRAIN_S)
        else:
            logger.error("the Spark job %s does not end although it was cancelled repeatedly", self._tag)

    def _outcomes(self) -> list[Outcome]:
        """The outcomes in the rows of the job.

        Raises:
            LaunchError: the tasks could not start their workers; the message lists the reasons.
        """
        if problems := task_function.problems(self._rows):
            raise LaunchError("the workers cannot start: " + "; ".join(problems[:5]))
        pieces: dict[int, list[bytes]] = {}
        for row in sorted(self._rows, key=lambda row: (row.slot, row.part)):
            pieces.setdefault(row.slot, []).append(bytes(row.data))
        size = self._num_tasks * self._workers_per_task
        if len(pieces) != size:
            raise LaunchError(f"Spark returned the results of {len(pieces)} workers, but {size} ran")
        return [verify(b"".join(parts), slot, self._secret) for slot, parts in pieces.items()]
