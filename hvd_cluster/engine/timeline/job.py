"""One rank's part in the timeline: when and where to send what it recorded."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from hvd_cluster.engine.timeline.file import TimelineFile
from hvd_cluster.engine.timeline.recorder import Record, Recorder
from hvd_cluster.settings import MIB

logger = logging.getLogger(__name__)

#: How often events travel to rank 0 and into the file. Programs read it 0.1 s after an operation.
_PERIOD_S = 0.04


class JobTimeline:
    """A rank's recorder and, on rank 0, the file.

    All ranks count the timelines of a world, because events of one may arrive when the next one has started.

    Args:
        recorder: this rank's events.
        send_up: sends the number of a timeline and records of it towards rank 0; None at rank 0, which writes the file.
        max_mb: the largest size of the file and the older one together, in MiB.
    """

    def __init__(self, recorder: Recorder, send_up: Callable[[int, list[Record]], None] | None, max_mb: float) -> None:
        self._recorder = recorder
        self._send_up = send_up
        self._max_mb = max_mb
        #: The number of the present timeline.
        self._number = 0
        #: Those of the present timeline and of the one before it, by their numbers.
        self._files: dict[int, TimelineFile] = {}
        self._next_flush_s = 0.0

    @property
    def next_flush_s(self) -> float | None:
        """When :meth:`flush` has something to do, or None."""
        return self._next_flush_s if self._recorder.enabled else None

    def start(self, path: str, mark_cycles: bool) -> None:
        """Record from now on, into a new file at ``path`` on rank 0."""
        self.stop()
        self._number += 1
        if self._send_up is None:
            for number, file in list(self._files.items()):
                if number < self._number - 1 or file.is_at(path):
                    self._close(number)
            try:
                self._files[self._number] = TimelineFile(path, int(self._max_mb * MIB))
            except OSError as error:
                logger.warning("no timeline is written: %s", error)
        self._recorder.start(mark_cycles)
        self._next_flush_s = time.monotonic() + _PERIOD_S

    def stop(self) -> None:
        """Stop recording; the file stays open for the last events of the other ranks."""
        self._recorder.stop()
        self.write(self._number, self._recorder.take())

    def flush(self, *, at_once: bool = False) -> None:
        """Send or write what was recorded, if the period is over or ``at_once``."""
        if self._recorder.enabled and (at_once or time.monotonic() >= self._next_flush_s):
            self._next_flush_s = time.monotonic() + _PERIOD_S
            self.write(self._number, self._recorder.take())

    def write(self, number: int, records: list[Record]) -> None:
        """Send or write records of this rank or of a rank below it in the tree.

        Args:
            number: the timeline to which they belong.
        """
        if not records:
            return
        if self._send_up is not None:
            self._send_up(number, records)
        elif number in self._files:
            try:
                self._files[number].write(records)
            except OSError as error:
                logger.warning("the timeline ends here: %s", error)
                self._close(number)

    def close(self) -> None:
        """Close the files, if there are any; may be called twice."""
        for number in list(self._files):
            self._close(number)

    def _close(self, number: int) -> None:
        self._files.pop(number).close()
