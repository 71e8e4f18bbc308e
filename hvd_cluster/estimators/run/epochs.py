"""Call driver callbacks once per epoch, however often its record arrives."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

logger = logging.getLogger(__name__)

DriverCallback = Callable[[dict[str, Any]], Any]


class StopFit(Exception):
    """Raised by a function of ``driver_callbacks`` to end the fit.

    The fit returns the model of its last checkpoint. Any other exception of such a function ends the fit too, and
    ``fit`` raises it.
    """


class EpochListener:
    """Calls each callback with the record of each epoch, in order.

    Args:
        callbacks: the user's; each is called as ``callback(record)``. An exception of one of them ends the fit.
        finished: epochs that an earlier fit of the run has reported.
        views: the package's own, such as trackers, called first. An exception of one of them is logged, and it is not
            called again.
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
        """Call the callbacks with the records that are new; from any thread.

        Raises:
            BaseException: what a callback raised. No callback is called after that.
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
            except Exception:  # of a tracking server or a display: not worth failing a fit
                logger.exception("a view of the fit failed at epoch %d and is not called again", record["epoch"])
                self._views.remove(view)
        for callback in self._callbacks:
            try:
                callback(record)
            except BaseException:  # raised again: the fit ends
                self._has_ended = True
                raise
