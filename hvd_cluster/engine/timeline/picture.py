"""A picture of a timeline: each rank's phases over time, and how long each took."""

from __future__ import annotations

import os
from typing import Any

from hvd_cluster.engine.timeline.summary import Summary
from hvd_cluster.engine.timeline.trace import Interval, Trace, union

#: More rows or phases than this cannot be distinguished.
_MAX_RANKS = 32
_MAX_PHASES = 8


def draw(trace: Trace, summary: Summary, path: str | os.PathLike[str]) -> None:
    """Write the picture as PNG to ``path``.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    # The figure alone, without pyplot: it needs no display and keeps no state in the process.
    from matplotlib.figure import Figure

    ranks = list(summary.ranks)[:_MAX_RANKS]
    phases = [phase.name for phase in summary.phases[:_MAX_PHASES]]
    figure = Figure(figsize=(14, 3 + 0.28 * len(ranks) * max(1, len(phases) / 3)), layout="constrained")
    timeline, bars = figure.subplots(1, 2, width_ratios=[3, 1])
    intervals: dict[tuple[int, str], list[Interval]] = {}
    for span in trace.spans:
        intervals.setdefault((span.rank, span.name), []).append((span.start_s, span.end_s))
    origin_s = min((span.start_s for span in trace.spans), default=0.0)
    height = 0.9 / max(1, len(phases))
    for number, name in enumerate(phases):
        for row, rank in enumerate(ranks):
            merged = union(intervals.get((rank, name), []))
            pieces = [(start_s - origin_s, end_s - start_s) for start_s, end_s in merged]
            timeline.broken_barh(pieces, (row - 0.45 + number * height, height), facecolors=f"C{number}")
        bars.barh(number, summary.phases[number].mean_s, color=f"C{number}")
    _label(timeline, bars, [summary.ranks[rank] for rank in ranks], phases)
    if len(summary.ranks) > len(ranks):
        timeline.set_title(f"the first {len(ranks)} of {len(summary.ranks)} ranks")
    figure.savefig(path, dpi=110, format="png")


def _label(timeline: Any, bars: Any, ranks: list[str], phases: list[str]) -> None:
    timeline.set_yticks(range(len(ranks)), ranks)
    timeline.set_ylim(len(ranks) - 0.5, -0.5)
    timeline.set_xlabel("seconds")
    bars.set_yticks(range(len(phases)), phases)
    bars.invert_yaxis()
    bars.set_xlabel("seconds per rank (mean)")
