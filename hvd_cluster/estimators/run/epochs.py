"""Calls the callbacks in the driver once for every epoch, however often and by whichever way its record arrives."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

logger = logging.getLogger(__name__)

DriverCallback = Callable[[dict[str, Any]], Any]


class StopFit(Exception):
    """Raised by a function of ``driver_callbacks``: the fit ends, and returns the model that it has so far.

    Any other exception of such a function ends the fit too, and is raised by ``fit``.
    """


class EpochListener:
    """Hands each record to each callback, in the order of the epochs.

    Args:
        callbacks: the user's; each is called as ``callback(record)``. What one of them raises ends the fit.
        finished: epochs that an earlier fit of the run has reported already.
        views: the package's own, such as trackers, called first. What they raise is logged, and the fit continues
            without them.
    """

    def __init__(
        self, callbacks: Sequence[DriverCallback], finished: int = 0, views: Sequence[DriverCallback] = ()
    ) -> None:
        self._callbacks = list(callbacks)
        self._views = list(views)
        #: Epochs that have been reported.
        self.finished = finished
        self._has_ended = False
        self._lock = threading.Lock()

    def add(self, records: Sequence[dict[str, Any]]) -> None:
        """Take records, known ones among them; from any thread.

        Raises:
            BaseException: what a callback raised. None is called after that.
        """
        with self._lock:
            for record in records:
                if record["epoch"] == self.finished and not self._has_ended:
                    self.finished += 1
                    self._call(record)

    def _call(self, record: dict[str, Any]) -> None:
        for view in list(self._views):
            try:
                view(record)
            except Exception:  # of a tracking server or a display: not worth a fit
                logger.exception("a view of the fit failed at epoch %d and is not called again", record["epoch"])
                self._views.remove(view)
        for callback in self._callbacks:
            try:
                callback(record)
            except BaseException:  # raised again: the fit ends
                self._has_ended = True
                raise
