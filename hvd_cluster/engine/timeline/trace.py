"""A timeline, read back: spans by rank and track."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hvd_cluster.engine.timeline.recorder import REPORT, STEP
from hvd_cluster.monitor.bottlenecks import RankSteps
from hvd_cluster.monitor.call_sites import CallSite
from hvd_cluster.monitor.step_clock import StepTime

Interval = tuple[float, float]


class Span(NamedTuple):
    """An event with a duration."""

    rank: int
    #: The name of the track, usually a tensor.
    track: str
    #: The phase, e.g. "NEGOTIATE_ALLREDUCE".
    name: str
    #: Seconds of the wall clock.
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Trace:
    """The spans of a timeline, oldest end first."""

    spans: list[Span] = field(default_factory=list)
    #: The name of each rank, e.g. "rank 0 (node-a)".
    ranks: dict[int, str] = field(default_factory=dict)
    #: Number of marked cycles.
    num_cycles: int = 0
    #: The training steps of each rank, and where it was.
    steps: dict[int, RankSteps] = field(default_factory=dict)

    @property
    def duration_s(self) -> float:
        """Seconds from the first start to the last end."""
        return max(s.end_s for s in self.spans) - min(s.start_s for s in self.spans) if self.spans else 0.0


def read(path: str | os.PathLike[str]) -> Trace:
    """The timeline at ``path``, together with the older file if there is one.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a timeline.
    """
    newest = Path(path)
    files = [newest.with_name(f"{newest.stem}.older{newest.suffix}"), newest]
    spans: list[Span] = []
    ranks: dict[int, str] = {}
    num_cycles = 0
    steps: dict[int, RankSteps] = defaultdict(RankSteps)
    for file in files:
        if file == newest or file.exists():
            found = _read_one(file, steps)
            ranks |= found.ranks
            spans += found.spans
            num_cycles += found.num_cycles
    spans.sort(key=lambda span: span.end_s)
    return Trace(spans, ranks, num_cycles, steps)


def _read_one(file: Path, steps: dict[int, RankSteps]) -> Trace:
    tracks: dict[tuple[int, int], str] = {}
    ranks: dict[int, str] = {}
    found: list[tuple[int, int, str, float, float]] = []
    num_cycles = 0
    for event in _events(file):
        try:
            kind, name, key = event["ph"], event["name"], (event["pid"], event["tid"])
            if kind == "X":
                start_s = event["ts"] / 1e6
                found.append((*key, name, start_s, start_s + event["dur"] / 1e6))
                args = event.get("args", {})
                if name == STEP and "seconds" in args:
                    steps[key[0]].times[args["number"]] = StepTime(*args["seconds"])
                elif name == REPORT and "call_sites" in args:
                    steps[key[0]].core_wait_s += args["core_wait_s"]
                    steps[key[0]].observed_s += event["dur"] / 1e6
                    steps[key[0]].add_call_sites([(CallSite(*site), count) for *site, count in args["call_sites"]])
            elif kind == "M" and name == "thread_name":
                tracks[key] = event["args"]["name"]
            elif kind == "M" and name == "process_name":
                ranks[key[0]] = event["args"]["name"]
            elif name == "CYCLE_START":
                num_cycles += 1
        except (KeyError, TypeError) as error:
            raise ValueError(f"{file} is not a timeline of hvd_cluster: an event lacks {error}") from error
    # Names may follow what they name.
    spans = [Span(rank, tracks.get((rank, track), f"track {track}"), *rest) for rank, track, *rest in found]  # type: ignore[arg-type]
    return Trace(spans, ranks, num_cycles)


def _events(file: Path) -> Iterator[dict[str, Any]]:
    """The events one by one, from a line each: a whole array may not fit in memory."""
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            text = line.strip().strip(",")
            if text in ("", "[", "]"):
                continue
            try:
                event = json.loads(text)
            except ValueError as error:
                raise ValueError(f"{file} is not a timeline of hvd_cluster: line {number + 1}: {error}") from error
            if not isinstance(event, dict):
                raise ValueError(f"{file} is not a timeline of hvd_cluster: line {number + 1} is not an event")
            yield event


def union(intervals: list[Interval]) -> list[Interval]:
    """The same time as sorted intervals that neither overlap nor touch."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def common(ours: list[Interval], theirs: list[Interval]) -> float:
    """The length of the intersection of two unions."""
    total, i, j = 0.0, 0, 0
    while i < len(ours) and j < len(theirs):
        total += max(0.0, min(ours[i][1], theirs[j][1]) - max(ours[i][0], theirs[j][0]))
        if ours[i][1] < theirs[j][1]:
            i += 1
        else:
            j += 1
    return total


def length(intervals: list[Interval]) -> float:
    """The length of a union."""
    return sum(end - start for start, end in intervals)
