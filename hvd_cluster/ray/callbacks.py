"""The user's callbacks, called in the user's own thread while that waits for a job."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
_DONE = object()


class CallbackLoop:
    """Takes what workers log from any thread, and calls the callbacks from one.

    Args:
        callbacks: each is called with every dict that a worker gives to ``ray_logger.log``. One that raises ends the
            job.

    Raises:
        TypeError: they are no list of functions.
    """

    def __init__(self, callbacks: Sequence[Callable[[dict[str, Any]], Any]] | None) -> None:
        given: Any = callbacks
        if callable(given) or not all(callable(each) for each in given or ()):
            raise TypeError(f"callbacks are a list of functions that take a dict, such as [print], not {given!r}")
        self._callbacks = list(callbacks or ())
        self._waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def put(self, info: dict[str, Any]) -> None:
        """Have the callbacks called with ``info``."""
        if self._callbacks:
            self._waiting.put(info)

    def until(self, job: Callable[[], T], stop: Callable[[], object]) -> T:
        """What ``job`` returns or raises; it runs in a thread of its own where there are callbacks.

        Args:
            job: what to wait for.
            stop: makes ``job`` end soon; called when a callback has raised, or the user has interrupted the wait.
        """
        if not self._callbacks:
            return job()
        results: list[T] = []
        errors: list[BaseException] = []

        def work() -> None:
            try:
                results.append(job())
            except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
                errors.append(error)
            finally:
                self._waiting.put(_DONE)

        thread = threading.Thread(target=work, name="hvd-callbacks", daemon=True)
        thread.start()
        try:
            while (info := self._waiting.get()) is not _DONE:
                for callback in self._callbacks:
                    callback(info)
        except BaseException:  # an interrupt as well
            stop()
            thread.join()
            raise
        thread.join()
        if errors:
            raise errors[0]
        return results[0]
