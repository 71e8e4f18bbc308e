"""Runs pieces of work in threads, ahead of their consumer.

Results come in order, within a bound of bytes.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from hvd_cluster.data.at_exit import close_at_exit, forget
from hvd_cluster.monitor.stacks import describe_threads
from hvd_cluster.settings import Settings

logger = logging.getLogger(__name__)

#: How often a wait checks whether to warn.
_REPORT_CHECK_S = 1.0

T = TypeVar("T")


class ReadAheadClosedError(RuntimeError):
    """Results were requested after the end."""

    def __init__(self) -> None:
        super().__init__("the reader was stopped (its `with` block has ended): make another one")


class ReadAhead(Generic[T]):
    """The results of ``work(0)``, ``work(1)``, ..., computed by threads ahead.

    Results that wait or are being computed take at most ``limit_bytes`` together; one piece larger than that runs
    alone. Which thread does what changes nothing about the results.

    Args:
        work: ``work(i, stopped)`` computes result number i. It may call ``stopped()`` now and then, and return early
            with anything when that is true: results are no longer wanted.
        sizes_bytes: the size of each result, asked for when its turn comes; there are as many pieces. What it raises
            takes the place of a result, the last one.
        num_threads: threads to run, >= 1.
        limit_bytes: bound of what is held in advance.
        name: of the threads.
        warns: log a warning when a result takes long.
    """

    def __init__(
        self,
        work: Callable[[int, Callable[[], bool]], T],
        sizes_bytes: Iterable[int],
        num_threads: int,
        limit_bytes: int,
        name: str = "hvd-reader",
        warns: bool = True,
    ) -> None:
        self._work = work
        self._coming = iter(sizes_bytes)
        self._next_bytes: int | None = None  # size of the first piece that no thread has taken
        self._exhausted = False
        self._limit = limit_bytes
        self._changed = threading.Condition()
        self._sizes: dict[int, int] = {}
        self._results: dict[int, T] = {}
        self._errors: dict[int, BaseException] = {}
        self._started = 0  # pieces that a thread has taken
        self._taken = 0  # results handed out
        self._held_bytes = 0
        self._stop = False
        self._warns = warns
        #: The result that :meth:`take` waits for, since when, and the one of which it has warned.
        self._waited_for, self._waits_since_s, self._warned_of = -1, 0.0, -1
        self._pid = os.getpid()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{index}", daemon=True) for index in range(num_threads)
        ]
        close_at_exit(self)
        for thread in self._threads:
            thread.start()

    @property
    def alive(self) -> bool:
        """Whether its threads run here: a forked process does not inherit them."""
        return self._pid == os.getpid()

    @property
    def is_closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._stop

    def take(self) -> T:
        """The next result; waits for it.

        Raises:
            IndexError: all results have been taken.
            ReadAheadClosedError: it was closed, perhaps by another thread while this one waited.
            BaseException: what ``work`` raised for this piece.
        """
        with self._changed:
            index = self._taken
            while self._stop or (index not in self._results and index not in self._errors):
                if self._stop:  # whatever is there may be what a piece under way returned early
                    raise ReadAheadClosedError
                if self._exhausted and index == self._started:
                    raise IndexError("all pieces have been taken")
                self._wait_for(index)
            self._taken += 1
            self._held_bytes -= self._sizes.pop(index, 0)
            self._changed.notify_all()
            if index in self._errors:
                raise self._errors.pop(index)
            return self._results.pop(index)

    def _wait_for(self, index: int) -> None:
        """Wait until something has changed; log a warning if result ``index`` takes long."""
        if index != self._waited_for:
            self._waited_for, self._waits_since_s = index, time.monotonic()
        if self._changed.wait(_REPORT_CHECK_S) or self._warned_of == index or not self._warns:
            return
        settings, waited_s = Settings.from_env(), time.monotonic() - self._waits_since_s
        if waited_s >= settings.stall_warning_s and not settings.stall_check_disable:
            self._warned_of = index
            doing = "; ".join(describe_threads()) or "no thread reads a file"
            logger.warning("the next rows have not come for %.0f s: %s", waited_s, doing)

    def close(self, timeout_s: float | None = None) -> None:
        """Stop the threads and wait at most ``timeout_s`` for them.

        Only pieces in progress are finished.
        """
        if not self.alive:
            return
        with self._changed:
            self._stop = True
            self._changed.notify_all()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for thread in self._threads:
            if thread is not threading.current_thread() and thread.is_alive():
                thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):
            forget(self)
        with self._changed:
            self._results.clear()
            self._errors.clear()

    def _stopped(self) -> bool:
        return self._stop

    def _run(self) -> None:
        while (index := self._next()) is not None:
            try:
                result = self._work(index, self._stopped)
            except BaseException as error:  # noqa: BLE001 - it is raised again where the result is taken
                with self._changed:
                    self._errors[index] = error
                    self._changed.notify_all()
            else:
                with self._changed:
                    self._results[index] = result
                    self._changed.notify_all()
                del result  # not held while this thread waits for room

    def _next(self) -> int | None:
        """Wait for room and take the next piece; None when there is nothing more to do."""
        with self._changed:
            while not self._stop:
                size = self._next_size()
                if size is None:
                    return None
                if self._held_bytes == 0 or self._held_bytes + size <= self._limit:
                    index, self._next_bytes = self._started, None
                    self._started += 1
                    self._sizes[index] = size
                    self._held_bytes += size
                    return index
                self._changed.wait()
            return None

    def _next_size(self) -> int | None:
        """The size of the first piece that no thread has taken; None where there is none."""
        if self._next_bytes is None and not self._exhausted:
            try:
                self._next_bytes = next(self._coming, None)
            except BaseException as error:  # noqa: BLE001 - it is raised again where the result is taken
                self._errors[self._started] = error
                self._started += 1
            if self._next_bytes is None:
                self._exhausted = True
                self._changed.notify_all()
        return self._next_bytes
