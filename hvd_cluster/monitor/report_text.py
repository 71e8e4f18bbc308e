"""The monitor's lines and its table, from numbers."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

from hvd_cluster.monitor.bottlenecks import PHRASES, Bottleneck
from hvd_cluster.monitor.step_clock import ACTIVITIES, StepTime

_MAX_RANKS_NAMED = 4


def shares(times: Sequence[StepTime]) -> dict[str, float]:
    """The share of each activity, by name, in the time of these steps.

    They add up to 1.
    """
    sums = [sum(column) for column in zip(*times, strict=True)] or [0.0] * len(ACTIVITIES)
    total = sum(sums) or 1.0
    return {name: value / total for name, value in zip(ACTIVITIES, sums, strict=True)}


def progress_line(step: int, step_s: float, ranks: Iterable[Mapping[str, float]], verdict: str) -> str:
    """One line about the recent steps.

    Args:
        step: the number of the last step.
        step_s: their mean duration.
        ranks: for each rank, the share of each activity.
        verdict: what slows them down, as a sentence; may be empty.
    """
    each = list(ranks)
    means = {name: statistics.fmean(rank[name] for rank in each) for name in ACTIVITIES}
    parts = sorted(means.items(), key=lambda item: -item[1])
    text = ", ".join(f"{name} {share:.0%}" for name, share in parts if share >= 0.005)
    return f"step {step}: {duration(step_s)} per step ({text})" + (f". {verdict}" if verdict else "")


def describe(bottleneck: Bottleneck, names: Mapping[int, str]) -> str:
    """A bottleneck as a sentence.

    For example "Rank 3 on node-b was last in 87 % of the steps, by 42 ms on average; ...".
    """
    what = PHRASES[bottleneck.activity]
    if not bottleneck.last_shares:
        return f"All ranks spend {duration(bottleneck.cost_s)} per step on {what}."
    if bottleneck.rank is None:
        shown = list(bottleneck.last_shares.items())[:_MAX_RANKS_NAMED]
        ranks = ", ".join(f"rank {rank} in {share:.0%}" for rank, share in shown)
        return (
            f"Different ranks are last: {ranks} of the steps, by {duration(bottleneck.behind_s)} on average; most of "
            f"it is {what}."
        )
    name = names[bottleneck.rank]
    share = bottleneck.last_shares.get(bottleneck.rank, 0.0)
    behind = duration(bottleneck.behind_s)
    text = f"{name[:1].upper()}{name[1:]} was last in {share:.0%} of the steps, by {behind} on average"
    if bottleneck.is_starved:  # in any line
        return f"{text}; its process waits for a core, because of its priority or other processes."
    text += f"; the cause is {what}"
    return text + (f": it was in {bottleneck.call_site}." if bottleneck.call_site else ".")


def table(times: Mapping[int, Sequence[StepTime]], last_shares: Mapping[int, float], names: Mapping[int, str]) -> str:
    """A line for each rank: milliseconds per step of each activity.

    It also says in how many steps the rank was the last.
    """
    width = max(map(len, names.values()))
    header = "".join(f"{name:>11}" for name in ACTIVITIES)
    lines = [f"{'ms per step':<{width}}{header}{'total':>11}{'last':>8}"]
    for rank, of in sorted(times.items()):
        means = [1e3 * statistics.fmean(column) for column in zip(*of, strict=True)]
        numbers = "".join(f"{value:>11.2f}" for value in [*means, sum(means)])
        lines.append(f"{names[rank]:<{width}}{numbers}{last_shares.get(rank, 0.0):>8.0%}")
    return "\n".join(lines)


def duration(seconds: float) -> str:
    """E.g. "1.25 s" or "42.0 ms"."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
