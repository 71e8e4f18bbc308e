"""The workers of one host as a group.

They start together, and the first failure ends them all.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from hvd_cluster.errors import LaunchError, StartTimeoutError
from hvd_cluster.launch.logs import OnLine, Tail, drop_line
from hvd_cluster.launch.outcome import Outcome, first_failure

logger = logging.getLogger(__name__)

#: Called with a rank and the fields of one of its progress reports.
OnEvent = Callable[[int, dict[str, Any]], None]

#: Seconds that the other workers get after a failure to notice and report it themselves.
FAILURE_GRACE_S = 3.0
#: Seconds for the actual cause to appear after a failure that looks like a consequence of another one.
SECONDARY_GRACE_S = 3.0
#: Seconds between SIGTERM and SIGKILL.
STOP_GRACE_S = 5.0
#: Seconds that a worker gets to exit after its function has returned.
EXIT_GRACE_S = 30.0


class StopCall(BaseException):
    """Raised by an ``on_event`` to stop all workers.

    The call then raises it in its caller's thread.
    """


def ignore_event(rank: int, event: dict[str, Any]) -> None:
    """An ``on_event`` that drops everything."""


@contextlib.contextmanager
def passing_on(rank: int) -> Iterator[None]:
    """A context for a call of a launcher's callback.

    An Exception that it raises is logged, and StopCall passes.
    """
    try:
        yield
    except Exception:  # a broken callback must not fail the job
        logger.exception("a message of rank %d could not be passed on", rank)


@dataclass(frozen=True, kw_only=True)
class Callbacks:
    """What a launcher calls, from other threads, when it hears from a worker."""

    #: Called with every line of its output.
    on_line: OnLine = drop_line
    #: Called with its progress reports; a command makes none.
    on_event: OnEvent = ignore_event
    #: Called before each call of workers that may live on after it.
    on_call: Callable[[], None] = lambda: None
    #: Called whenever its ``ready``, ``reported``, ``outcome`` or ``stop_call`` has changed.
    on_change: Callable[[], None] = lambda: None


class Worker(ABC):
    """A worker as its launcher sees it."""

    def __init__(self, rank: int, callbacks: Callbacks) -> None:
        self.rank = rank
        #: It runs and waits for requests.
        self.ready = False
        #: The outcome of the last call; None while it runs.
        self.reported: Outcome | None = None
        #: How it ended; None while it lives.
        self.outcome: Outcome | None = None
        #: What its ``on_event`` raised to stop the call.
        self.stop_call: StopCall | None = None
        self._callbacks = callbacks
        self._tail = Tail()

    @property
    def output_tail(self) -> str:
        """The last lines of its output."""
        return self._tail.text()

    @contextlib.contextmanager
    def _passing_on(self) -> Iterator[None]:
        """A context for calls of the launcher's callbacks.

        Their errors neither end the receiving thread nor fail the job.
        """
        try:
            with passing_on(self.rank):
                yield
        except StopCall as stop:
            self.stop_call = stop
            self._callbacks.on_change()

    @property
    @abstractmethod
    def place(self) -> str:
        """Its process and host for messages, e.g. "process 407 on node-b"."""

    @abstractmethod
    def write_stack(self) -> None:
        """Have it write its Python stack to its standard error, if it can.

        :meth:`terminate` lets it finish.
        """

    @abstractmethod
    def terminate(self) -> None:
        """Send SIGTERM to the process group."""

    @abstractmethod
    def kill(self) -> None:
        """Send SIGKILL to the process group."""

    @abstractmethod
    def wait(self) -> Outcome | None:
        """Wait until it has ended, or its host is lost."""


W = TypeVar("W", bound=Worker)


class WorkerGroup(Generic[W]):
    """Workers that start and end together.

    Args:
        failure_grace_s: how long the other workers may continue after the first failure.
        on_failure: called once, with the first failure, before the workers that still run are stopped.
    """

    def __init__(
        self, *, failure_grace_s: float = FAILURE_GRACE_S, on_failure: Callable[[Outcome], None] | None = None
    ) -> None:
        self.workers: list[W] = []
        self._failure_grace_s = failure_grace_s
        self._on_failure = on_failure
        self._changed = threading.Condition()

    def start(self, starters: Iterable[Callable[[Callbacks], W]], callbacks: Callbacks) -> None:
        """Start the workers; each starter is called with the callbacks of its worker.

        Raises:
            LaunchError: a program cannot be started; workers that were already started are stopped.
        """

        callbacks = replace(callbacks, on_change=self._notify)

        def start(starter: Callable[[Callbacks], W]) -> None:
            self.workers.append(starter(callbacks))

        try:
            # In threads, because only the main thread is interrupted: every running worker must be in the list.
            with ThreadPoolExecutor(max_workers=8, thread_name_prefix="hvd-start") as pool:
                list(pool.map(start, starters))
            self.workers.sort(key=lambda worker: worker.rank)
        except OSError as error:
            self.stop()
            raise LaunchError(f"a worker cannot be started: {error}") from error

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until every worker is ready, or one has ended (its outcome says why).

        Raises:
            StartTimeoutError: some workers were not ready in time; all are stopped.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: any(worker.outcome for worker in self.workers) or all(worker.ready for worker in self.workers),
                timeout_s,
            )
        late = [worker for worker in self.workers if not worker.ready]
        if late and not any(worker.outcome for worker in self.workers):
            self.stop()
            raise StartTimeoutError(_timeout_text(late, len(self.workers), timeout_s))

    def reports(self) -> list[Outcome]:
        """The outcomes of the present call on all ranks.

        Workers live on, unless one died or hangs after a failure.

        Raises:
            StopCall: an ``on_event`` raised it.
        """
        self._wait_for_all()
        return self._outcomes()

    def report_of(self, worker: W) -> Outcome:
        """The outcome of the present call on one worker alone.

        The others do not take part in it.
        """
        self._wait_until(lambda: bool(worker.reported or worker.outcome), None)
        outcome = worker.reported or worker.outcome
        assert outcome is not None
        return outcome

    def ends(self) -> list[Outcome]:
        """The outcomes of all workers, when all have ended."""
        reports = self.reports()
        self.let_exit(EXIT_GRACE_S if all(report.ok for report in reports) else self._failure_grace_s)
        return [worker.outcome for worker in self.workers if worker.outcome is not None]

    def let_exit(self, grace_s: float = EXIT_GRACE_S) -> None:
        """Wait until all have exited by themselves.

        Those that have not after ``grace_s`` seconds are stopped.
        """
        if not self._wait_until(lambda: self.all_ended, time.monotonic() + grace_s):
            hanging = [worker.rank for worker in self._living()]
            logger.warning("ranks %s did not exit within %g s after their last call: stopping them", hanging, grace_s)
        self.stop()

    @property
    def all_ended(self) -> bool:
        """Whether all workers have ended."""
        return all(worker.outcome is not None for worker in self.workers)

    @property
    def all_live(self) -> bool:
        """Whether no worker has ended."""
        return all(worker.outcome is None for worker in self.workers)

    def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Send SIGTERM to every living worker, and SIGKILL after ``grace_s`` seconds.

        Returns when all have ended.
        """
        try:
            for worker in self._living():
                worker.terminate()
            self._wait_until(lambda: self.all_ended, time.monotonic() + grace_s)
        finally:  # also if a second interrupt ends the wait
            for worker in self._living():
                worker.kill()
        for worker in self.workers:
            worker.wait()

    def _living(self) -> Sequence[W]:
        return [worker for worker in self.workers if worker.outcome is None]

    def _outcomes(self) -> list[Outcome]:
        return [outcome for worker in self.workers if (outcome := worker.outcome or worker.reported)]

    def _wait_for_all(self) -> None:
        """Wait for an outcome of every worker.

        After a failure, wait only for a limited time, then stop the rest.
        """

        def complete() -> bool:
            return len(self._outcomes()) == len(self.workers)

        def has_cause() -> bool:
            return any(not outcome.is_secondary for outcome in self._outcomes())

        def stop_call() -> StopCall | None:
            return next((stop for worker in self.workers if (stop := worker.stop_call)), None)

        def failed_or_stopped() -> bool:
            return bool(stop_call()) or any(not outcome.ok for outcome in self._outcomes())

        self._wait_until(lambda: complete() or failed_or_stopped(), None)
        if (stop := stop_call()) is not None:
            raise stop
        # A rank that noticed a death may end before the launcher notices the death itself.
        self._wait_until(lambda: complete() or has_cause(), time.monotonic() + SECONDARY_GRACE_S)
        failed = first_failure(self._outcomes())
        is_complete = self._wait_until(complete, time.monotonic() + self._failure_grace_s)
        if failed is not None and self._on_failure is not None:
            self._on_failure(failed)
        if not is_complete:
            hanging = [worker for worker in self._living() if worker.reported is None]
            if hanging:
                logger.warning(
                    "stopping what still runs %g s after the first failure: %s", self._failure_grace_s, _named(hanging)
                )
            for worker in hanging:  # what it waits for may be the cause
                worker.write_stack()
            self.stop()

    def _wait_until(self, condition: Callable[[], bool], deadline_s: float | None) -> bool:
        with self._changed:
            timeout_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            return self._changed.wait_for(condition, timeout_s)

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()


def _named(workers: Sequence[Worker]) -> str:
    return ", ".join(f"rank {worker.rank} ({worker.place})" for worker in workers)


def _timeout_text(late: Sequence[Worker], size: int, timeout_s: float) -> str:
    text = (
        f"{len(late)} of {size} workers did not start within {timeout_s:g} s: {_named(late)}. "
        f"If this host is slow or busy, raise start_timeout (now {timeout_s:g}) or HOROVOD_START_TIMEOUT."
    )
    for worker in late:
        if worker.output_tail:
            lines = "\n".join(f"  {line}" for line in worker.output_tail.splitlines())
            text += f"\nLast output of rank {worker.rank}:\n{lines}"
    return text
