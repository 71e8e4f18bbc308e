"""Runs pieces of work in threads, ahead of who needs the results, in order and bounded in bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class ReadAhead(Generic[T]):
    """The results of ``work(0)``, ``work(1)``, ... in that order, computed by threads in advance.

    Results that wait or are being computed take at most ``limit_bytes`` together; one piece larger than that runs
    alone. Which thread does what changes nothing about the results.

    Args:
        work: ``work(i, stopped)`` computes result number i. It may call ``stopped()`` now and then, and return early
            with anything when that is true: nobody wants results any more.
        sizes_bytes: the size of each result; their number is the number of pieces.
        num_threads: threads to run, >= 1.
        limit_bytes: bound of what is held in advance.
    """

    def __init__(
        self,
        work: Callable[[int, Callable[[], bool]], T],
        sizes_bytes: Sequence[int],
        num_threads: int,
        limit_bytes: int,
    ) -> None:
        self._work = work
        self._sizes = sizes_bytes
        self._limit = limit_bytes
        self._changed = threading.Condition()
        self._results: dict[int, T] = {}
        self._errors: dict[int, BaseException] = {}
        self._started = 0  # pieces that a thread has taken
        self._taken = 0  # results handed out
        self._held_bytes = 0
        self._stop = False
        self._threads = [
            threading.Thread(target=self._run, name=f"hvd-reader-{index}", daemon=True)
            for index in range(min(num_threads, len(sizes_bytes)))
        ]
        for thread in self._threads:
            thread.start()

    def take(self) -> T:
        """The next result; waits for it.

        Raises:
            IndexError: all results have been taken.
            BaseException: what ``work`` raised for this piece.
        """
        if self._taken == len(self._sizes):
            raise IndexError("all pieces have been taken")
        with self._changed:
            index = self._taken
            while index not in self._results and index not in self._errors:
                self._changed.wait()
            self._taken += 1
            self._held_bytes -= self._sizes[index]
            self._changed.notify_all()
            if index in self._errors:
                raise self._errors.pop(index)
            return self._results.pop(index)

    def close(self) -> None:
        """Stop the threads and wait for them; at most the pieces under way are finished."""
        with self._changed:
            self._stop = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
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
                index = self._started
                if index == len(self._sizes):
                    return None
                if self._held_bytes == 0 or self._held_bytes + self._sizes[index] <= self._limit:
                    self._started += 1
                    self._held_bytes += self._sizes[index]
                    return index
                self._changed.wait()
            return None
