"""What slows a job down, from the step times of all its ranks.

In each step the rank that has waited least for others is the one that they waited for: it was the last. A rank that is
last repeatedly is a straggler. What it does longer than the median of the other ranks is the cause. The time that
ranks wait for a straggler, and the time that all of them spend on the same activity, are compared in seconds per step,
so the first bottleneck of the list is the one that costs most.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hvd_cluster.monitor.call_sites import CallSite
from hvd_cluster.monitor.step_clock import ACTIVITIES, COMPUTE, DATA, LATE, OPTIMIZER, OTHER, SAVE, TRANSFER, StepTime

#: The smallest share of the steps' time that counts: what all ranks spend, and what they wait for late ranks.
_MIN_SHARE, _MIN_LATE_SHARE = 0.1, 0.05
#: A rank that was last in this share of the steps, weighted by how late it was, is the straggler.
_MIN_LAST_SHARE = 0.6
#: What a straggler does longer than others; it waits neither for others nor, longer than they do, for transfers.
_CAUSES = (DATA, COMPUTE, OPTIMIZER, SAVE, OTHER)
#: A rank that waits for a core for this share of the time by which it is late is slowed down by other processes.
_MIN_CORE_WAIT_SHARE = 0.5
#: A place is forgotten at this weight. One that was seen once counts for another report: under load there are some
#: without a look.
_MIN_WEIGHT = 0.5

#: What to call the activity of a straggler, or of all ranks.
PHRASES = {
    DATA: "waiting for data",
    COMPUTE: "forward and backward",
    TRANSFER: "transferring",
    OPTIMIZER: "the optimizer",
    SAVE: "saving",
    OTHER: "code between the steps",
}


@dataclass
class RankSteps:
    """What is known of the recent steps of one rank."""

    #: By the number of the step.
    times: dict[int, StepTime] = field(default_factory=dict)
    #: Where its training thread was while others waited for it, and how often it was seen there, lately above all.
    call_sites: dict[CallSite, float] = field(default_factory=dict)
    #: Seconds in which its training thread could have run and had no core, and of how many seconds.
    core_wait_s: float = 0.0
    observed_s: float = 0.0
    #: How many reports in a row had no steps.
    num_idle_reports: int = 0

    def fade(self) -> None:
        """Give less weight to what was seen before.

        A straggler may do something else now.
        """
        self.call_sites = {site: weight / 2 for site, weight in self.call_sites.items() if weight > _MIN_WEIGHT}
        self.core_wait_s /= 2
        self.observed_s /= 2

    def add_call_sites(self, seen: Sequence[tuple[CallSite, int]]) -> None:
        """Add where the training thread was seen, and how often."""
        for site, count in seen:
            self.call_sites[site] = self.call_sites.get(site, 0.0) + count


@dataclass(frozen=True)
class Bottleneck:
    """One thing that slows the job down."""

    #: A number of :mod:`~hvd_cluster.monitor.step_clock`.
    activity: int
    #: Seconds per step that it costs, averaged over the ranks.
    cost_s: float
    #: The straggler; None if all ranks spend this time, or if the last rank changes from step to step.
    rank: int | None = None
    #: The share of the steps in which each rank was the last, if ranks wait for each other.
    last_shares: Mapping[int, float] = field(default_factory=dict)
    #: How much later the last rank was than the last but one, on average, in seconds.
    behind_s: float = 0.0
    #: Where the straggler was.
    call_site: str = ""
    #: The straggler waits for a core, because of other processes or its own priority.
    is_starved: bool = False


def common_steps(ranks: Mapping[int, RankSteps], max_steps: int) -> list[int]:
    """The last steps that are known of every rank, oldest first."""
    known = set.intersection(*(set(steps.times) for steps in ranks.values())) if ranks else set()
    return sorted(known)[-max_steps:]


def last_rank(step: Mapping[int, StepTime]) -> tuple[int, float] | None:
    """The rank awaited in a step, and how many seconds; None if all came together."""
    if len(step) < 2:
        return None
    last, second = sorted(step, key=lambda rank: step[rank][LATE])[:2]
    behind_s = step[second][LATE] - step[last][LATE]
    return (last, behind_s) if behind_s > 0 else None


def count_last(ranks: Mapping[int, RankSteps], steps: Sequence[int]) -> Counter[int]:
    """How often each rank was the last in these steps, which are known of all ranks."""
    found = (last_rank({rank: of.times[step] for rank, of in ranks.items()}) for step in steps)
    return Counter(each[0] for each in found if each is not None)


def find_bottlenecks(ranks: Mapping[int, RankSteps], steps: Sequence[int]) -> list[Bottleneck]:
    """What slows the job down in these steps, the most expensive first.

    Empty if nothing stands out.

    Args:
        ranks: the steps of each rank.
        steps: numbers of steps that are known of every rank.
    """
    if not steps:
        return []
    times = {rank: [of.times[step] for step in steps] for rank, of in ranks.items()}
    total_s = statistics.fmean(time.total_s for each in times.values() for time in each)
    common = [_common(times, activity) for activity in (DATA, TRANSFER, OPTIMIZER, SAVE)]
    found = [each for each in common if each.cost_s >= _MIN_SHARE * total_s]
    if len(ranks) > 1:
        straggler = _straggler(ranks, times)
        found += [straggler] if straggler.cost_s >= _MIN_LATE_SHARE * total_s else []
    return sorted(found, key=lambda bottleneck: -bottleneck.cost_s)


def _common(times: Mapping[int, Sequence[StepTime]], activity: int) -> Bottleneck:
    """What every rank spends on an activity.

    In each step it is the time of the rank that spends least.
    """
    steps = zip(*times.values(), strict=True)
    return Bottleneck(activity, statistics.fmean(min(time[activity] for time in step) for step in steps))


def _straggler(ranks: Mapping[int, RankSteps], times: Mapping[int, Sequence[StepTime]]) -> Bottleneck:
    """That ranks wait for late ones: for one of them, or for different ones."""
    num_last: Counter[int] = Counter()
    behind_s: dict[int, float] = dict.fromkeys(times, 0.0)
    excess_s: dict[int, list[float]] = {rank: [0.0] * len(ACTIVITIES) for rank in times}
    num_steps = len(next(iter(times.values())))
    for index in range(num_steps):
        step = {rank: each[index] for rank, each in times.items()}
        if (found := last_rank(step)) is None:
            continue
        last, late_s = found
        num_last[last] += 1
        behind_s[last] += late_s
        for activity in _CAUSES:
            usual_s = statistics.median(step[rank][activity] for rank in step if rank != last)
            excess_s[last][activity] += step[last][activity] - usual_s
    cost_s = statistics.fmean(time[LATE] for each in times.values() for time in each)
    last_shares = {rank: count / num_steps for rank, count in num_last.most_common()}
    all_behind_s = sum(behind_s.values())
    if not all_behind_s:
        return Bottleneck(OTHER, 0.0)
    worst = max(behind_s, key=lambda rank: behind_s[rank])
    if behind_s[worst] < _MIN_LAST_SHARE * all_behind_s:
        summed = [sum(excess_s[rank][activity] for rank in excess_s) for activity in range(len(ACTIVITIES))]
        return Bottleneck(_largest(summed), cost_s, None, last_shares, all_behind_s / num_steps)
    activity = _largest(excess_s[worst])
    straggler = ranks[worst]
    core_wait_share = straggler.core_wait_s / straggler.observed_s if straggler.observed_s else 0.0
    core_wait_s = core_wait_share * sum(time.total_s for time in times[worst])
    # While the thread is between two steps, the clock does not know yet whether it is computing.
    same = {activity, *({COMPUTE, OTHER} if activity in (COMPUTE, OTHER) else ())}
    matching = {site: weight for site, weight in straggler.call_sites.items() if site.activity in same}
    return Bottleneck(
        activity,
        cost_s,
        worst,
        last_shares,
        behind_s[worst] / num_last[worst],
        max(matching, key=matching.__getitem__).text if matching else "",
        activity in (COMPUTE, OPTIMIZER) and core_wait_s >= _MIN_CORE_WAIT_SHARE * excess_s[worst][activity] > 0,
    )


def _largest(values: Sequence[float]) -> int:
    return max(_CAUSES, key=lambda activity: values[activity])
