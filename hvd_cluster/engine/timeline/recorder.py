"""One rank's events: cheap to record in any thread, made into JSON when taken."""

from __future__ import annotations

import json
import re
import time
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Final

from hvd_cluster.monitor.rank_report import RankReport
from hvd_cluster.monitor.step_clock import ACTIVITIES, StepTime, step_clock

#: One line of the file: (rank, track, whether it names that track, JSON). Track 0 is the rank's own.
Record = tuple[int, int, bool, bytes]

#: How many events are kept between two calls of :meth:`Recorder.take`; the others are only counted.
_MAX_EVENTS = 20_000
#: More tensors than this share one track.
_MAX_TRACKS = 4096
#: Longer names are cut: an event must fit into one page of the file.
_LONGEST_NAME = 256
_CLOCK_READINGS = 9

#: The track of the training steps, and the name of the spans that are whole steps.
STEPS_TRACK, STEP = "steps", "STEP"
#: The same for where the training thread was between two reports, and what is kept of it: it must fit into a page too.
REPORTS_TRACK, REPORT = "reports of steps", "REPORT"
_MAX_CALL_SITES, _LONGEST_CALL_SITE = 4, 128

_NOTHING: Final = nullcontext()
_encode = json.JSONEncoder(separators=(",", ":")).encode


class Recorder:
    """Collects one rank's events; costs little while :attr:`enabled` is False.

    :meth:`span`, :meth:`phase` and :meth:`mark_cycle` may be called from any thread, the rest from one.

    Args:
        rank: the rank whose events these are.
        host: its host, for the name of its tracks.
    """

    def __init__(self, rank: int, host: str) -> None:
        self.enabled = False
        self._marks_cycles = False
        self._rank = rank
        self._host = host
        # (tensor or "" for the rank's own track, name, start, end or -1 for an instant, arguments). Every operation on
        # this list is one call, so that threads need no lock.
        self._events: list[tuple[str, str, float, float, dict[str, Any]]] = []
        self._num_dropped = 0
        self._tracks: dict[str, int] = {}
        self._must_introduce = False
        # Read once: monotonic times relative to one wall-clock origin never run backwards.
        self._origin_us = _wall_clock_origin_ns() // 1000

    def start(self, mark_cycles: bool = False) -> None:
        """Start to record; the names of this rank's tracks come first."""
        self._tracks = {}
        self._marks_cycles = mark_cycles
        self._events.clear()
        self._num_dropped = 0
        self._must_introduce = True
        self.enabled = True
        step_clock.observer = self

    def stop(self) -> None:
        """Stop recording; recorded events can still be taken."""
        self.enabled = False
        if step_clock.observer is self:
            step_clock.observer = None

    def span(self, tensor: str, name: str, start_s: float, end_s: float, **args: Any) -> None:
        """Record a span in the track ``tensor``; times are those of ``time.monotonic()``."""
        if self.enabled:
            self._note(tensor, name, start_s, end_s, args)

    def phase(self, tensors: list[str], name: str, **args: Any) -> AbstractContextManager[None]:
        """Record the ``with`` block in the tracks ``tensors``."""
        return _Phase(self, tensors, name, args) if self.enabled else _NOTHING

    def note_activity(self, activity: int, start_s: float, end_s: float) -> None:
        """Record an activity of training; see :mod:`hvd_cluster.monitor.step_clock`."""
        if end_s > start_s:
            self.span(STEPS_TRACK, ACTIVITIES[activity].upper(), start_s, end_s)

    def note_step(self, number: int, start_s: float, end_s: float, step: StepTime) -> None:
        """Record a step, with the seconds of each activity."""
        self.span(STEPS_TRACK, STEP, start_s, end_s, number=number, seconds=[round(value, 6) for value in step])

    def note_report(self, report: RankReport) -> None:
        """Record where the training thread was when awaited, and how long without a core."""
        sites = [
            (site.text[:_LONGEST_CALL_SITE], site.activity, count)
            for site, count in report.call_sites[:_MAX_CALL_SITES]
        ]
        now_s = time.monotonic()
        start_s = now_s - report.interval_s
        self.span(REPORTS_TRACK, REPORT, start_s, now_s, core_wait_s=round(report.core_wait_s, 6), call_sites=sites)

    def mark_cycle(self) -> None:
        """Mark the start of a cycle of the engine, if cycles are marked."""
        if self.enabled and self._marks_cycles:
            self._note("", "CYCLE_START", time.monotonic(), -1.0, {})

    def take(self) -> list[Record]:
        """The lines for events since the last call; tracks are named before their use."""
        count = len(self._events)
        events = self._events[:count]
        del self._events[:count]
        records: list[Record] = []
        if self._must_introduce:
            self._must_introduce = False
            records.append(self._metadata("process_name", 0, name=f"rank {self._rank} ({self._host})"[:_LONGEST_NAME]))
            records.append(self._metadata("process_sort_index", 0, sort_index=self._rank))
        for tensor, name, start_s, end_s, args in events:
            if end_s < 0:
                records.append(self._line(0, {"ph": "i", "name": name, "s": "p", "ts": self._us(start_s)}))
                continue
            track = self._track(tensor, records)
            length_us = max(0, round((end_s - start_s) * 1e6))
            event = {"ph": "X", "name": name[:_LONGEST_NAME], "ts": self._us(start_s), "dur": length_us}
            if args:
                event["args"] = {key: _cut(value) for key, value in args.items()}
            records.append(self._line(track, event))
        if self._num_dropped:
            text = f"DROPPED {self._num_dropped} EVENTS"
            self._num_dropped = 0
            records.append(self._line(0, {"ph": "i", "name": text, "s": "p", "ts": self._us(time.monotonic())}))
        return records

    def _note(self, tensor: str, name: str, start_s: float, end_s: float, args: dict[str, Any]) -> None:
        if len(self._events) < _MAX_EVENTS:
            self._events.append((tensor, name, start_s, end_s, args))
        else:
            self._num_dropped += 1

    def _track(self, tensor: str, records: list[Record]) -> int:
        # Unnamed operations are numbered without end: a track for each would hide all others.
        tensor = re.sub(r"(\.noname)(\.join\d+)?\.\d+", r"\1", tensor)[:_LONGEST_NAME]
        if tensor not in self._tracks:
            if len(self._tracks) >= _MAX_TRACKS:
                tensor = "more tensors"
            if tensor not in self._tracks:
                self._tracks[tensor] = len(self._tracks) + 1
                records.append(self._metadata("thread_name", self._tracks[tensor], name=tensor))
        return self._tracks[tensor]

    def _metadata(self, kind: str, track: int, **args: Any) -> Record:
        rank, track, _, line = self._line(track, {"ph": "M", "name": kind, "args": args})
        return rank, track, True, line

    def _line(self, track: int, event: dict[str, Any]) -> Record:
        return self._rank, track, False, _encode({**event, "pid": self._rank, "tid": track}).encode()

    def _us(self, monotonic_s: float) -> int:
        return self._origin_us + round(monotonic_s * 1e6)


class _Phase:
    """A ``with`` block that is recorded as a span in each of its tracks."""

    __slots__ = ("_args", "_name", "_recorder", "_start_s", "_tensors")

    def __init__(self, recorder: Recorder, tensors: list[str], name: str, args: dict[str, Any]) -> None:
        self._recorder, self._tensors, self._name, self._args = recorder, tensors, name, args

    def __enter__(self) -> None:
        self._start_s = time.monotonic()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end_s = time.monotonic()
        for tensor in self._tensors:
            self._recorder.span(tensor, self._name, self._start_s, end_s, **self._args)


def _wall_clock_origin_ns() -> int:
    """The wall clock at the zero of ``time.monotonic``.

    Of several readings the fastest one is used, as in Cristian's algorithm: a thread that waits for its core between
    its readings of the two clocks would shift the events of its rank.
    """
    readings: list[tuple[int, int]] = []
    for _ in range(_CLOCK_READINGS):
        before_ns, wall_ns, after_ns = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        readings.append((after_ns - before_ns, wall_ns - (before_ns + after_ns) // 2))
    return min(readings)[1]


def _cut(value: Any) -> Any:
    return value[:_LONGEST_NAME] if isinstance(value, str) else value
