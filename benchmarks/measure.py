"""What every benchmark shares: two contenders that take turns in one run, medians, and the ratio with its spread."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """One comparison."""

    #: What was measured, e.g. "2 ranks, 16 MB".
    work: str
    #: Median seconds of ours.
    ours_s: float
    #: Median seconds of the peer.
    peer_s: float
    #: peer / ours of each turn: smallest and largest of the middle half.
    ratio_low: float
    ratio_high: float

    @property
    def ratio(self) -> float:
        """How many times faster ours is."""
        return self.peer_s / self.ours_s


@dataclass(frozen=True)
class Table:
    """What one module found."""

    title: str
    peer: str
    rows: Sequence[Row]

    def markdown(self) -> str:
        """The table of this run for benchmarks/README.md."""
        lines = [
            f"## {self.title}",
            "",
            f"| work | ours | {self.peer} | ratio (middle half of the turns) |",
            "|---|---|---|---|",
        ]
        for row in self.rows:
            spread = f"{row.ratio:.2f}x ({row.ratio_low:.2f} to {row.ratio_high:.2f})"
            lines.append(f"| {row.work} | {seconds(row.ours_s)} | {seconds(row.peer_s)} | {spread} |")
        return "\n".join(lines) + "\n"


def compare(
    ours: Callable[[], object], peer: Callable[[], object], turns: int, per_turn: int
) -> dict[str, list[float]]:
    """Seconds per call of both, turn by turn, alternating so that both meet the same disturbances."""
    for contender in (ours, peer):
        contender()
    times: dict[str, list[float]] = {"ours": [], "peer": []}
    for _ in range(turns):
        for name, contender in (("ours", ours), ("peer", peer)):
            start_s = time.perf_counter()
            for _ in range(per_turn):
                contender()
            times[name].append((time.perf_counter() - start_s) / per_turn)
    return times


def row(work: str, times: dict[str, list[float]]) -> Row:
    """The medians and the spread of the ratio."""
    ratios = sorted(peer / ours for ours, peer in zip(times["ours"], times["peer"], strict=True))
    quarter = len(ratios) // 4
    return Row(
        work,
        statistics.median(times["ours"]),
        statistics.median(times["peer"]),
        ratios[quarter],
        ratios[-1 - quarter],
    )


def seconds(value_s: float) -> str:
    """For people: "1.23 ms"."""
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if value_s * scale >= 1:
            return f"{value_s * scale:.3g} {unit}"
    return f"{value_s * 1e6:.3g} us"


def conditions() -> str:
    """Where and when this was measured."""
    import torch

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "?")
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return (
        f"{time.strftime('%Y-%m-%d')}; {os.cpu_count()} cores, {model}{gpu}; Linux {platform.release()}; "
        f"Python {platform.python_version()}, torch {torch.__version__}; OMP_NUM_THREADS=1; "
        f"load before the run {os.getloadavg()[0]:.2f}."
    )
