"""The timeline: what happened to every tensor, on every rank, as Chrome trace events (opens in Perfetto).

Each rank records its own events and sends them up the engine's tree; rank 0 writes them all into one file, so that the
file has a group of lanes for each rank and a lane in it for each tensor. Times are microseconds of the wall clock.
The format is the JSON array of the "Trace Event Format" document of the Chrome project.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

logger = logging.getLogger(__name__)

Event = dict[str, Any]

#: How often events travel to rank 0 and into the file.
_PERIOD_S = 0.5


class Recorder:
    """Collects the events of one rank; costs next to nothing while :attr:`enabled` is False.

    Args:
        rank: the rank whose events these are.
        host: its host, for the name of its lanes.
    """

    def __init__(self, rank: int, host: str) -> None:
        self.enabled = False
        self._marks_cycles = False
        self._rank = rank
        self._host = host
        self._events: list[Event] = []
        self._lanes: dict[str, int] = {}
        # One reading of both clocks: monotonic differences on top of a wall-clock origin never run backwards.
        self._origin_us = time.time_ns() // 1000 - time.monotonic_ns() // 1000

    def start(self, mark_cycles: bool = False) -> None:
        """Begin to record, with the names of this rank's lanes first."""
        self._lanes.clear()
        self._marks_cycles = mark_cycles
        self._events = [
            self._metadata("process_name", 0, name=f"rank {self._rank} ({self._host})"),
            self._metadata("process_sort_index", 0, sort_index=self._rank),
        ]
        self.enabled = True

    def stop(self) -> None:
        """Record nothing more; what was recorded can still be taken."""
        self.enabled = False

    def take(self) -> list[Event]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events

    def span(self, tensor: str, name: str, start_s: float, end_s: float, **args: Any) -> None:
        """Something that went on from ``start_s`` to ``end_s`` (``time.monotonic()``) in the lane of ``tensor``."""
        if self.enabled:
            self._record("X", tensor, name, start_s, dur=max(0, round((end_s - start_s) * 1e6)), args=args)

    @contextmanager
    def phase(self, tensors: list[str], name: str, **args: Any) -> Iterator[None]:
        """Record the ``with`` block in the lanes of all ``tensors``."""
        if not self.enabled:
            yield
            return
        start_s = time.monotonic()
        yield
        end_s = time.monotonic()
        for tensor in tensors:
            self.span(tensor, name, start_s, end_s, **args)

    def mark_cycle(self) -> None:
        """Mark the start of a cycle of the engine, if that was asked for."""
        if self.enabled and self._marks_cycles:
            self._events.append(
                {
                    "ph": "i",
                    "name": "CYCLE_START",
                    "s": "p",
                    "pid": self._rank,
                    "tid": 0,
                    "ts": self._us(time.monotonic()),
                }
            )

    def _record(self, phase: str, tensor: str, name: str, start_s: float, **rest: Any) -> None:
        lane = self._lanes.get(tensor)
        if lane is None:
            lane = self._lanes[tensor] = len(self._lanes) + 1
            self._events.append(self._metadata("thread_name", lane, name=tensor))
        self._events.append(
            {"ph": phase, "name": name, "pid": self._rank, "tid": lane, "ts": self._us(start_s), **rest}
        )

    def _metadata(self, kind: str, lane: int, **args: Any) -> Event:
        return {"ph": "M", "name": kind, "pid": self._rank, "tid": lane, "args": args}

    def _us(self, monotonic_s: float) -> int:
        return self._origin_us + round(monotonic_s * 1e6)


class TimelineFile:
    """The job's timeline on disk: a JSON array that is complete after every write, whoever dies when.

    Args:
        path: the file; an existing one is replaced.
    """

    _END: Final = b"\n]\n"

    def __init__(self, path: str | os.PathLike[str]) -> None:
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._is_empty = True
        self._end = os.write(self._descriptor, b"[" + self._END) - len(self._END)

    def write(self, events: list[Event]) -> None:
        """Append ``events``."""
        if not events:
            return
        lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events).encode()
        block = (b"\n" if self._is_empty else b",\n") + lines
        # One call puts the events and the new end over the old end, so the file is never seen without one.
        os.pwrite(self._descriptor, block + self._END, self._end)
        self._end += len(block)
        self._is_empty = False

    def close(self) -> None:
        """Close the file; may be called twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class JobTimeline:
    """One rank's part in the job's timeline: its recorder, and the file where this is rank 0.

    Args:
        recorder: this rank's events.
        send_up: sends events towards rank 0; None at rank 0, which writes the file.
    """

    def __init__(self, recorder: Recorder, send_up: Callable[[list[Event]], None] | None) -> None:
        self._recorder = recorder
        self._send_up = send_up
        self._file: TimelineFile | None = None
        self._next_flush_s = 0.0

    @property
    def next_flush_s(self) -> float | None:
        """When :meth:`flush` has something to do, or None."""
        return self._next_flush_s if self._recorder.enabled else None

    def start(self, path: str, mark_cycles: bool) -> None:
        """Record from now on, into a new file at ``path`` on rank 0."""
        self.stop()
        if self._send_up is None:
            self.close()
            try:
                self._file = TimelineFile(path)
            except OSError as error:
                logger.warning("no timeline is written: %s", error)
        self._recorder.start(mark_cycles)
        self._next_flush_s = time.monotonic() + _PERIOD_S

    def stop(self) -> None:
        """Record nothing more. The file stays open: the last events of the other ranks are still on their way."""
        self._recorder.stop()
        self.write(self._recorder.take())

    def flush(self) -> None:
        """Pass on what was recorded, when the time for it has come."""
        if self._recorder.enabled and time.monotonic() >= self._next_flush_s:
            self._next_flush_s = time.monotonic() + _PERIOD_S
            self.write(self._recorder.take())

    def write(self, events: list[Event]) -> None:
        """Pass on events, of this rank or of one below it in the tree."""
        if not events:
            return
        if self._send_up is not None:
            self._send_up(events)
        elif self._file is not None:
            try:
                self._file.write(events)
            except OSError as error:
                logger.warning("the timeline ends here: %s", error)
                self.close()

    def close(self) -> None:
        """Close the file, if there is one; may be called twice."""
        if self._file is not None:
            self._file.close()
            self._file = None
