"""The root's view of all ranks: their reports, and what slows the job down."""

from __future__ import annotations

import statistics
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hvd_cluster.monitor.bottlenecks import Bottleneck, RankSteps, common_steps, count_last, find_bottlenecks
from hvd_cluster.monitor.node_usage import NodeUsage
from hvd_cluster.monitor.rank_report import RankReport, max_steps
from hvd_cluster.monitor.report_text import describe, progress_line, shares, table
from hvd_cluster.monitor.step_clock import NUMBERS_PER_JOIN, StepTime

#: Steps that are kept, as a multiple of :func:`max_steps`.
_KEPT_FACTOR = 4
#: A rank that has reported no steps so often, while others have, does not train any more.
_MAX_IDLE_REPORTS = 2


@dataclass(frozen=True)
class JobSteps:
    """What the root knows of the recent steps of all ranks."""

    #: How many steps all ranks have made.
    step: int
    #: The mean of the recent steps.
    step_s: float
    #: By rank, the share of each activity in the recent steps.
    shares: dict[int, dict[str, float]]
    #: The most expensive first.
    bottlenecks: list[Bottleneck]
    #: The first of them as a sentence, or "".
    verdict: str
    #: By host, how busy it is.
    usage: dict[str, NodeUsage] = field(default_factory=dict)

    def line(self) -> str:
        """All of this but the usage, in one line."""
        return progress_line(self.step, self.step_s, self.shares.values(), self.verdict)


class JobMonitor:
    """Thread-safe: the engine adds reports, and others read.

    Args:
        hosts: the host of each rank.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self._lock = threading.Lock()
        self._hosts = list(hosts)
        self._names = {rank: f"rank {rank} on {host}" for rank, host in enumerate(hosts)}
        self._ranks = {rank: RankSteps() for rank in range(len(hosts))}
        self._max_steps = max_steps(len(hosts))
        self._usage: dict[str, NodeUsage] = {}
        #: By rank, all its steps: their number and seconds of each activity.
        self._totals: dict[int, tuple[int, StepTime]] = {}
        #: By rank, in how many steps it was the last; and how many steps were looked at.
        self._num_last: Counter[int] = Counter()
        self._num_compared = 0
        self._compared_to = -1
        self._latest_step = 0
        #: What :meth:`steps` has returned last.
        self.last_steps: JobSteps | None = None

    def add(self, report: RankReport) -> None:
        """A rank has reported."""
        with self._lock:
            steps = self._ranks[report.rank]
            steps.times |= report.times()
            for step in sorted(steps.times)[: -_KEPT_FACTOR * self._max_steps]:
                del steps.times[step]
            if report.packed:
                steps.num_idle_reports = 0
                self._latest_step = max(self._latest_step, *steps.times)
                steps.fade()
                steps.core_wait_s += report.core_wait_s
                steps.observed_s += report.interval_s
            elif self._is_behind(steps):
                steps.num_idle_reports += 1
            steps.add_call_sites(report.call_sites)
            self._totals[report.rank] = report.totals
            if report.usage is not None:
                self._usage[self._hosts[report.rank]] = report.usage

    def steps(self) -> JobSteps | None:
        """Look at the recent steps; None before all ranks have reported one."""
        with self._lock:
            ranks = self._training_ranks()
            common = common_steps(ranks, self._max_steps)
            if not common:
                return None
            self._count_last(ranks, common)
            found = find_bottlenecks(ranks, common)
            times = {rank: [of.times[step] for step in common] for rank, of in ranks.items()}
            self.last_steps = JobSteps(
                min(self._totals[rank][0] for rank in ranks),
                statistics.fmean(time.total_s for each in times.values() for time in each),
                {rank: shares(each) for rank, each in times.items()},
                found,
                describe(found[0], self._names) if found else "",
                dict(self._usage),
            )
            return self.last_steps

    def counts(self) -> tuple[dict[int, tuple[int, StepTime]], dict[int, int]]:
        """By rank: its steps so far with seconds of activities, and times it was last."""
        with self._lock:
            return dict(self._totals), dict(self._num_last)

    def summary(self) -> str | None:
        """A table of all steps so far, and what slowed down the last ones.

        None if no rank has reported a step.
        """
        job = self.steps()
        with self._lock:
            means: Mapping[int, Sequence[StepTime]] = {
                rank: [StepTime(*(value / num for value in sums))] for rank, (num, sums) in self._totals.items() if num
            }
            if not means:
                return None
            last_shares = {rank: count / self._num_compared for rank, count in self._num_last.items()}
            num_steps = max(num for num, _ in self._totals.values())
        lines = [f"{num_steps} steps", table(means, last_shares, self._names)]
        if job is not None:
            lines += [describe(bottleneck, self._names) for bottleneck in job.bottlenecks]
        return "\n".join(lines)

    def _training_ranks(self) -> dict[int, RankSteps]:
        """Those whose steps are compared, if every rank has reported.

        The others are outside of a process set that trains, or have joined: they report no steps while others make
        several. A rank for which the others wait is at most a step behind them, however long that takes.
        """
        if len(self._totals) < len(self._hosts):
            return {}
        ranks = {rank: of for rank, of in self._ranks.items() if of.times}
        busy = {rank: of for rank, of in ranks.items() if of.num_idle_reports < _MAX_IDLE_REPORTS}
        return busy or ranks

    def _is_behind(self, steps: RankSteps) -> bool:
        """More than one step behind: otherwise the others may wait for it."""
        is_first = self._latest_step % NUMBERS_PER_JOIN == 0  # after a join: the step before has any lower number
        return not is_first and max(steps.times, default=0) < self._latest_step - 1

    def _count_last(self, ranks: Mapping[int, RankSteps], common: Sequence[int]) -> None:
        new = [step for step in common if step > self._compared_to] if len(ranks) > 1 else []
        self._num_last += count_last(ranks, new)
        self._num_compared += len(new)
        self._compared_to = max(self._compared_to, common[-1])
