"""Calls the user's callbacks in the user's own thread while it waits for a job."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
_DONE = object()


class CallbackLoop:
    """Accepts what workers log from any thread, and calls the callbacks from one.

    Args:
        callbacks: each is called with every dict that a worker passes to ``ray_logger.log``. If one raises an
            exception, the job ends.

    Raises:
        TypeError: they are not a list of functions.
    """

    def __init__(self, callbacks: Sequence[Callable[[dict[str, Any]], Any]] | None) -> None:
        given: Any = callbacks
        if callable(given) or not all(callable(each) for each in given or ()):
            raise TypeError(f"callbacks must be a list of functions that take a dict, such as [print], not {given!r}")
        self._callbacks = list(callbacks or ())
        self._waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def put(self, info: dict[str, Any]) -> None:
        """Have the callbacks called with ``info``."""
        if self._callbacks:
            self._waiting.put(info)

    def until(self, job: Callable[[], T], stop: Callable[[], object]) -> T:
        """Run ``job``, in a thread if there are callbacks, and return its result."""
        if not self._callbacks:
            return job()
        future: Future[T] = Future()

        def work() -> None:
            try:
                future.set_result(job())
            except BaseException as error:  # noqa: BLE001 - re-raised in the waiting thread
                future.set_exception(error)
            finally:
                self._waiting.put(_DONE)

        thread = threading.Thread(target=work, name="hvd-callbacks", daemon=True)
        thread.start()
        try:
            while (info := self._waiting.get()) is not _DONE:
                for callback in self._callbacks:
                    callback(info)
        except BaseException:  # also after an interrupt
            stop()
            thread.join()
            raise
        thread.join()
        return future.result()
