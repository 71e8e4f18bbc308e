"""Tells callbacks in the driver of every epoch once, however often and by whichever way its record arrives."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

logger = logging.getLogger(__name__)


class EpochListener:
    """Hands each record to each callback, in the order of the epochs.

    What a callback raises is logged, and the fit goes on without that callback.

    Args:
        callbacks: each is called as ``callback(record)``.
        finished: epochs that an earlier fit of the run has told of already.
    """

    def __init__(self, callbacks: Sequence[Callable[[dict[str, Any]], Any]], finished: int = 0) -> None:
        self._callbacks = list(callbacks)
        self._next = finished
        self._lock = threading.Lock()

    def hear(self, records: Sequence[dict[str, Any]]) -> None:
        """Take records, known ones among them; from any thread."""
        with self._lock:
            for record in records:
                if record["epoch"] == self._next:
                    self._next += 1
                    self._tell(record)

    def _tell(self, record: dict[str, Any]) -> None:
        for callback in list(self._callbacks):
            try:
                callback(record)
            except Exception:  # the user's own code, in the thread that hears the workers
                logger.exception("a driver callback failed at epoch %d and is not called again", record["epoch"])
                self._callbacks.remove(callback)
