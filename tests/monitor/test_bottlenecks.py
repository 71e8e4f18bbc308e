"""What slows a job down, found from the times of its steps."""

from __future__ import annotations

from collections import Counter

import pytest

from hvd_cluster.monitor.bottlenecks import RankSteps, common_steps, find_bottlenecks
from hvd_cluster.monitor.call_sites import CallSite
from hvd_cluster.monitor.report_text import describe, duration, progress_line, shares, table
from hvd_cluster.monitor.step_clock import COMPUTE, DATA, OTHER, SAVE, TRANSFER, StepTime

NAMES = {0: "rank 0 on a", 1: "rank 1 on a", 2: "rank 2 on b"}


def step(**seconds: float) -> StepTime:
    """A step of 10 ms of computation and what is given."""
    usual = {f"{name}_s": 0.0 for name in ("data", "late", "transfer", "optimizer", "save", "other")}
    return StepTime(**(usual | {"compute_s": 0.01} | {f"{name}_s": value for name, value in seconds.items()}))


def job(*ranks: list[StepTime]) -> dict[int, RankSteps]:
    """The ranks of a job, each with its steps from number 1 on."""
    return {rank: RankSteps(dict(enumerate(steps, 1))) for rank, steps in enumerate(ranks)}


def test_a_rank_that_is_always_late_is_the_straggler_and_what_it_does_longer_is_the_cause() -> None:
    waiting = [step(late=0.04, data=0.001)] * 20
    ranks = job(waiting, waiting, [step(data=0.041)] * 20)
    ranks[2].call_sites = Counter({CallSite("f (a.py:1)", COMPUTE): 9, CallSite("read (a.py:2)", DATA): 5})
    (found,) = find_bottlenecks(ranks, common_steps(ranks, 200))
    assert (found.activity, found.rank, found.call_site) == (DATA, 2, "read (a.py:2)")
    assert found.behind_s == pytest.approx(0.04)
    assert found.cost_s == pytest.approx(0.08 / 3)
    assert found.last_shares == {2: 1.0}
    assert describe(found, NAMES) == (
        "Rank 2 on b was last in 100% of the steps, by 40.0 ms on average; the cause is waiting for data: it was in "
        "read (a.py:2)."
    )


def test_a_rank_that_waits_for_a_core_while_it_computes_is_starved() -> None:
    waiting = [step(late=0.04)] * 20
    ranks = job(waiting, [step(compute=0.05)] * 20, waiting)
    ranks[1].core_wait_s, ranks[1].observed_s = 0.6, 1.0
    (found,) = find_bottlenecks(ranks, common_steps(ranks, 200))
    assert (found.activity, found.rank, found.is_starved) == (COMPUTE, 1, True)
    assert "its process waits for a core" in describe(found, NAMES)
    ranks[1].core_wait_s = 0.1
    assert not find_bottlenecks(ranks, common_steps(ranks, 200))[0].is_starved


def test_if_the_last_rank_changes_no_single_one_is_named() -> None:
    ranks = job(
        [step(other=0.03) if i % 3 == 0 else step(late=0.03) for i in range(30)],
        [step(other=0.03) if i % 3 == 1 else step(late=0.03) for i in range(30)],
        [step(other=0.03) if i % 3 == 2 else step(late=0.03) for i in range(30)],
    )
    (found,) = find_bottlenecks(ranks, common_steps(ranks, 200))
    assert (found.activity, found.rank) == (OTHER, None)
    assert describe(found, NAMES).startswith("Different ranks are last: rank 0 in 33%, rank 1 in 33%, rank 2 in 33%")


def test_rare_but_long_delays_outweigh_frequent_short_ones() -> None:
    ranks = job(
        [step(save=0.5) if i % 10 == 0 else step(late=0.001) for i in range(30)],
        [step(late=0.5) if i % 10 == 0 else step() for i in range(30)],
    )
    (found,) = find_bottlenecks(ranks, common_steps(ranks, 200))
    assert (found.activity, found.rank, found.last_shares[0]) == (SAVE, 0, 0.1)


@pytest.mark.parametrize(("name", "activity"), [("data", DATA), ("transfer", TRANSFER), ("save", SAVE)])
def test_what_all_ranks_spend_time_on_is_a_bottleneck_without_a_rank(name: str, activity: int) -> None:
    ranks = job(*[[step(**{name: 0.02})] * 5] * 3)
    (found,) = find_bottlenecks(ranks, common_steps(ranks, 200))
    assert (found.activity, found.rank, found.cost_s) == (activity, None, pytest.approx(0.02))
    assert describe(found, NAMES).startswith("All ranks spend 20.0 ms per step on ")


def test_a_balanced_job_has_no_bottleneck_and_neither_has_one_without_steps() -> None:
    ranks = job(*[[step(late=0.0002, transfer=0.0005)] * 5] * 3)
    assert find_bottlenecks(ranks, common_steps(ranks, 200)) == []
    assert find_bottlenecks(ranks, []) == []
    assert find_bottlenecks(job([step()]), [1]) == []


def test_the_most_expensive_bottleneck_comes_first() -> None:
    ranks = job([step(late=0.04, transfer=0.01)] * 9, [step(compute=0.05, transfer=0.01)] * 9)
    assert [each.activity for each in find_bottlenecks(ranks, common_steps(ranks, 200))] == [COMPUTE, TRANSFER]


def test_only_steps_of_all_ranks_are_compared() -> None:
    ranks = job([step()] * 5, [step()] * 3)
    assert common_steps(ranks, 200) == [1, 2, 3]
    assert common_steps(ranks, 2) == [2, 3]
    assert common_steps({}, 200) == []


def test_ranks_that_come_together_make_no_straggler() -> None:
    """LATE is exactly 0 where a rank's waits were over before it began to wait."""
    assert find_bottlenecks(job([step(late=0.005)] * 9, [step()] * 9, [step()] * 9), range(1, 10)) == []


def test_the_line_has_the_shares_of_a_step_and_the_verdict() -> None:
    ranks = [shares([step(late=0.04)]), shares([step(data=0.04)])]
    assert progress_line(20, 0.05, ranks, "Rank 1 is late.") == (
        "step 20: 50.0 ms per step (data 40%, late 40%, compute 20%). Rank 1 is late."
    )
    assert progress_line(1, 0.01, [shares([step()])], "") == "step 1: 10.0 ms per step (compute 100%)"


def test_shares_add_up_to_one_and_the_table_has_a_line_for_each_rank() -> None:
    found = shares([step(data=0.01), step(transfer=0.02)])
    assert sum(found.values()) == pytest.approx(1)
    assert found["transfer"] == pytest.approx(0.4)
    assert set(shares([]).values()) == {0.0}
    header, first, second = table({1: [step(late=0.03)], 0: [step(data=0.03)]}, {0: 1.0}, NAMES).splitlines()
    assert header.split()[-2:] == ["total", "last"]
    assert first.split()[-2:] == ["40.00", "100%"]
    assert second.startswith("rank 1 on a")
    assert (duration(1.234), duration(0.0123)) == ("1.23 s", "12.3 ms")
