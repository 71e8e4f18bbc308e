"""A timeline in numbers: phases, slowest ranks, communication hidden by backward."""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from dataclasses import dataclass, field

from hvd_cluster.engine.timeline.recorder import REPORT, STEP
from hvd_cluster.engine.timeline.trace import Interval, Span, Trace, common, length, union
from hvd_cluster.monitor import report_text
from hvd_cluster.monitor.bottlenecks import Bottleneck, RankSteps, common_steps, count_last, find_bottlenecks
from hvd_cluster.monitor.step_clock import StepTime

#: The span that covers a backward pass.
BACKWARD = "BACKWARD"
_NEGOTIATE = "NEGOTIATE_"
#: A transport's own phases, e.g. GLOO_ALLREDUCE. ALLREDUCE alone is the whole operation, with what it waited for.
_COMMUNICATION = re.compile(r"(?!NEGOTIATE_)\w+_(ALLREDUCE|ALLGATHER|BCAST|ALLTOALL|REDUCESCATTER|BARRIER)\w*")
#: Phases of what only launches work.
_ON_GPUS = "NCCL_"


@dataclass(frozen=True)
class PhaseTimes:
    """One phase over all ranks."""

    name: str
    #: Spans of this name on all ranks together.
    num_spans: int
    #: Seconds during which at least one tensor of the rank was in this phase.
    seconds: dict[int, float]

    @property
    def longest(self) -> int:
        """The rank with most time here; in NEGOTIATE it waited, and is not the slowest."""
        return max(self.seconds, key=lambda rank: self.seconds[rank])

    @property
    def mean_s(self) -> float:
        """Mean over the ranks."""
        return statistics.fmean(self.seconds.values())


@dataclass(frozen=True)
class Straggler:
    """How often one rank was the last to submit a tensor."""

    rank: int
    num_last: int
    #: Seconds during which some tensor waited only for this rank.
    late_s: float


@dataclass(frozen=True)
class Summary:
    """A timeline in numbers."""

    duration_s: float
    ranks: dict[int, str]
    num_cycles: int
    #: Longest first.
    phases: list[PhaseTimes]
    #: Operations that every rank has negotiated and that are complete in the timeline.
    num_operations: int
    #: For each rank; the one that made the others wait longest comes first.
    stragglers: list[Straggler]
    #: Seconds of communication of each rank.
    communication_s: dict[int, float]
    #: Share of it that overlaps a backward pass; empty if the timeline does not show backward, and on GPUs, where it
    #: shows only launches.
    overlap: dict[int, float]
    #: GPUs have communicated.
    on_gpus: bool
    #: For each rank, the training steps that the timeline shows of all ranks.
    steps: dict[int, list[StepTime]] = field(default_factory=dict)
    #: For each rank, in which share of them it was the last.
    last_shares: dict[int, float] = field(default_factory=dict)
    #: What slows these steps down, the most expensive first.
    bottlenecks: list[Bottleneck] = field(default_factory=list)


def summarize(trace: Trace) -> Summary:
    """The numbers of ``trace``."""
    by_phase: dict[str, dict[int, list[Interval]]] = defaultdict(lambda: defaultdict(list))
    for span in trace.spans:
        if span.name in (STEP, REPORT):
            continue
        by_phase[span.name][span.rank].append((span.start_s, span.end_s))
    ranks = {span.rank for span in trace.spans} | set(trace.ranks)
    phases = [
        PhaseTimes(
            name,
            sum(map(len, by_rank.values())),
            {rank: length(union(by_rank.get(rank, []))) for rank in sorted(ranks)},
        )
        for name, by_rank in by_phase.items()
    ]
    busy: dict[int, list[Interval]] = {}
    for rank in sorted(ranks):
        intervals = [i for name, of in by_phase.items() if _COMMUNICATION.fullmatch(name) for i in of.get(rank, [])]
        busy[rank] = union(intervals)
    on_gpus = any(name.startswith(_ON_GPUS) for name in by_phase)
    shows_both = BACKWARD in by_phase and not on_gpus
    backward = {rank: union(by_phase[BACKWARD].get(rank, [])) for rank in busy} if shows_both else {}
    num_operations, stragglers = _stragglers(trace.spans, ranks)
    times = {rank: trace.steps.get(rank, RankSteps()) for rank in sorted(ranks)}
    common_numbers = common_steps(times, max((len(of.times) for of in times.values()), default=0))
    num_last = count_last(times, common_numbers)
    return Summary(
        duration_s=trace.duration_s,
        ranks={rank: trace.ranks.get(rank, f"rank {rank}") for rank in sorted(ranks)},
        num_cycles=trace.num_cycles,
        phases=sorted(phases, key=lambda phase: -phase.mean_s),
        num_operations=num_operations,
        stragglers=stragglers,
        communication_s={rank: length(intervals) for rank, intervals in busy.items()},
        overlap={
            rank: common(busy[rank], backward[rank]) / length(busy[rank])
            for rank in backward
            if backward[rank] and busy[rank]
        },
        on_gpus=on_gpus,
        steps={rank: [of.times[number] for number in common_numbers] for rank, of in times.items() if common_numbers},
        last_shares={rank: count / len(common_numbers) for rank, count in num_last.items()},
        bottlenecks=find_bottlenecks(times, common_numbers),
    )


def _stragglers(spans: list[Span], ranks: set[int]) -> tuple[int, list[Straggler]]:
    """Which rank submitted last, how often and how late.

    A rank's negotiation span begins when that rank submits and ends when all ranks have. A tensor is negotiated again
    only after that, so in the order of their ends the spans of one operation of a tensor are adjacent.
    """
    counts: dict[int, int] = dict.fromkeys(ranks, 0)
    waits: dict[int, list[Interval]] = {rank: [] for rank in ranks}
    open_operations: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    num_operations = 0
    for span in spans:
        if not span.name.startswith(_NEGOTIATE):
            continue
        starts = open_operations[span.name, span.track]
        if span.rank in starts:  # the file lacks part of the previous operation, or its process set has not all ranks
            starts.clear()
        starts[span.rank] = span.start_s
        if len(starts) == len(ranks) > 1:
            *_, second, last = sorted(starts, key=lambda rank: starts[rank])
            counts[last] += 1
            waits[last].append((starts[second], starts[last]))
            num_operations += 1
            starts.clear()
    stragglers = [Straggler(rank, counts[rank], length(union(waits[rank]))) for rank in sorted(ranks)]
    return num_operations, sorted(stragglers, key=lambda late: -late.late_s)


def table(summary: Summary, max_phases: int = 20) -> str:
    """The summary as lines of text."""
    lines = [
        f"{len(summary.ranks)} ranks, {_seconds(summary.duration_s)}"
        + (f", {summary.num_cycles} cycles" if summary.num_cycles else ""),
        "",
        f"{'phase':<32}{'spans':>9}{'mean/rank':>12}{'share':>8}{'longest on rank':>22}",
    ]
    for phase in summary.phases[:max_phases]:
        share = phase.mean_s / summary.duration_s if summary.duration_s else 0.0
        longest = f"{phase.longest}: {_seconds(phase.seconds[phase.longest])}"
        lines.append(f"{phase.name:<32}{phase.num_spans:>9}{_seconds(phase.mean_s):>12}{share:>8.1%}{longest:>22}")
    if len(summary.phases) > max_phases:
        lines.append(f"... and {len(summary.phases) - max_phases} more phases")
    lines.append("")
    worst = summary.stragglers[0] if summary.stragglers else None
    if summary.steps:
        lines += _steps(summary)
    elif summary.num_operations and worst is not None:
        lines.append(
            f"Slowest rank: {summary.ranks[worst.rank]} was the last to submit in {worst.num_last} of "
            f"{summary.num_operations} operations; the others waited {_seconds(worst.late_s)} for it."
        )
    else:
        lines.append("Slowest rank: this timeline has no operation that two or more ranks have negotiated.")
    if summary.overlap:
        shares = ", ".join(f"rank {rank} {share:.0%}" for rank, share in summary.overlap.items())
        lines.append(f"Communication during backward: {shares}.")
    elif summary.on_gpus:
        lines.append("Communication during backward: on GPUs a timeline shows launches; use torch.profiler.")
    else:
        lines.append("Communication during backward: this timeline does not show both.")
    return "\n".join(lines)


def _steps(summary: Summary) -> list[str]:
    """The training steps, as the monitor writes them."""
    num_steps = len(next(iter(summary.steps.values())))
    return [
        f"{num_steps} training steps:",
        *report_text.table(summary.steps, summary.last_shares, summary.ranks).splitlines(),
        *(report_text.describe(found, summary.ranks) for found in summary.bottlenecks),
        "",
    ]


def _seconds(value_s: float) -> str:
    return f"{value_s:.2f} s" if value_s >= 1 else f"{value_s * 1e3:.2f} ms"
