"""The root's view of all ranks, and how Prometheus sees it."""

from __future__ import annotations

import builtins
import logging
import socket
import time
import urllib.request
from array import array
from typing import Any

import psutil
import pytest

from hvd_cluster.monitor.call_sites import CallSite
from hvd_cluster.monitor.job_monitor import JobMonitor
from hvd_cluster.monitor.metrics import MetricsServer
from hvd_cluster.monitor.node_usage import NodeMeter, NodeUsage
from hvd_cluster.monitor.rank_report import RankReport, RankReporter, core_wait_s
from hvd_cluster.monitor.step_clock import DATA, NUMBERS_PER_JOIN, StepClock, StepTime

WAITING = StepTime(0.0, 0.01, 0.03, 0.0, 0.0, 0.0, 0.0)
LATE = StepTime(0.03, 0.01, 0.0, 0.0, 0.0, 0.0, 0.0)


def report(rank: int, first: int, steps: list[StepTime], **other: Any) -> RankReport:
    """A report of these steps."""
    packed = array("f", [value for step in steps for value in step]).tobytes()
    totals = (first + len(steps) - 1, StepTime(*(value * (first + len(steps) - 1) for value in steps[0])))
    numbers = array("Q", range(first, first + len(steps))).tobytes()
    usual = {"call_sites": (), "core_wait_s": 0.0, "interval_s": 1.0}
    return RankReport(rank, numbers, packed, totals, **(usual | other))


def filled() -> JobMonitor:
    """Two ranks, of which the second is late."""
    job = JobMonitor(["a", "b"])
    job.add(report(0, 1, [WAITING] * 10, usage=NodeUsage(50.0, 25.0, (90.0,), (10.0,))))
    assert job.steps() is None
    site = CallSite("read (train.py:3)", DATA)
    job.add(report(1, 1, [LATE] * 10, call_sites=((site, 4),)))
    return job


def test_the_root_names_the_late_rank_when_all_have_reported() -> None:
    job = filled().steps()
    assert job is not None
    assert job.step == 10
    assert job.shares[1]["data"] == pytest.approx(0.75)
    assert job.verdict.startswith("Rank 1 on b was last in 100% of the steps, by 30.0 ms on average")
    assert job.verdict.endswith("it was in read (train.py:3).")
    assert job.usage["a"].metrics() == {
        "cpu_percent": 50.0,
        "memory_percent": 25.0,
        "gpu0_percent": 90.0,
        "gpu0_memory_percent": 10.0,
    }


def test_what_a_straggler_did_before_is_forgotten() -> None:
    job = filled()
    first = job.steps()
    assert first is not None
    assert "read (train.py:3)" in first.line()
    for turn in range(1, 5):
        job.add(report(0, 10 * turn + 1, [WAITING] * 10))
        job.add(report(1, 10 * turn + 1, [LATE] * 10))
    last = job.steps()
    assert last is not None
    assert "read" not in last.line()


def test_a_place_that_was_seen_once_is_remembered_through_a_report_without_a_look() -> None:
    job = filled()
    seen = ((CallSite("once (train.py:9)", DATA), 1),)
    for turn, sites in enumerate([(), (), (), (), seen, ()], start=1):
        job.add(report(0, 10 * turn + 1, [WAITING] * 10))
        job.add(report(1, 10 * turn + 1, [LATE] * 10, call_sites=sites))
    last = job.steps()
    assert last is not None
    assert last.verdict.endswith("it was in once (train.py:9).")


def test_the_summary_counts_all_steps_and_who_was_last() -> None:
    job = JobMonitor(["a", "b"])
    assert job.summary() is None
    job = filled()
    job.add(report(0, 11, [LATE] * 10))
    job.add(report(1, 11, [WAITING] * 10))
    first, _, rank_0, rank_1, *verdict = (job.summary() or "").splitlines()
    assert first == "20 steps"
    assert (rank_0.split()[-1], rank_1.split()[-1]) == ("50%", "50%")
    assert verdict[0].startswith("Different ranks are last")


def test_a_reporter_sends_each_step_once_and_the_totals_of_all() -> None:
    clock = StepClock()
    reporter = RankReporter(3, 4, clock, lambda: NodeUsage(1.0, 2.0))
    for _ in range(151):
        clock.end_step()
    first = reporter.report()
    assert (first.rank, first.totals[0], first.usage) == (3, 150, NodeUsage(1.0, 2.0))
    assert list(first.times()) == list(range(1, 151))
    clock.end_step()
    second = reporter.report()
    assert list(second.times()) == [151]
    assert reporter.report().times() == {}


def test_of_many_steps_all_ranks_report_nearly_the_same_ones_and_no_pattern() -> None:
    chosen = []
    for num_steps in (1000, 1400):
        clock = StepClock()
        reporter = RankReporter(0, 512, clock, None)
        for _ in range(num_steps + 1):
            clock.end_step()
        report = reporter.report()
        assert report.totals[0] == num_steps
        chosen.append(set(report.times()))
    mine, other = chosen
    assert 10 <= len(mine) <= 25
    assert len(mine & other) >= 4
    assert {number % 2 for number in mine} == {0, 1}
    assert {number % 3 for number in mine} == {0, 1, 2}


def test_ranks_that_do_not_train_are_left_out() -> None:
    job = JobMonitor(["a", "a", "b"])
    job.add(report(0, 1, [WAITING] * 10))
    job.add(report(2, 1, [LATE] * 10))
    assert job.steps() is None
    job.add(RankReport(1, b"", b"", (0, StepTime(*[0.0] * 7)), (), 0.0, 1.0))
    found = job.steps()
    assert found is not None
    assert set(found.shares) == {0, 2}
    assert found.bottlenecks[0].rank == 2


def test_the_time_without_a_core_is_unknown_for_no_thread() -> None:
    assert core_wait_s(0) == 0.0


def test_this_host_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = NodeMeter().measure()
    assert usage.memory_percent is not None
    assert 0 < usage.memory_percent <= 100
    real = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name in ("psutil", "pynvml"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    assert NodeMeter().measure().metrics() == {}


def test_a_rank_without_new_steps_does_not_hold_up_the_others() -> None:
    """It has joined."""
    job = filled()
    for turn in range(1, 3):
        job.add(report(0, 10 * turn + 1, [WAITING] * 10))
        job.add(RankReport(1, b"", b"", (10, StepTime(*[1.0] * 7)), (), 0.0, 1.0))
    found = job.steps()
    assert found is not None
    assert (found.step, set(found.shares)) == (30, {0})


def test_a_rank_that_the_others_wait_for_is_named_however_long_it_takes() -> None:
    job = filled()
    job.add(report(0, 11, [WAITING]))
    for _ in range(5):  # it is in its 11th step
        job.add(RankReport(1, b"", b"", (10, StepTime(*[1.0] * 7)), (), 0.0, 1.0))
    job.add(report(0, 12, [WAITING] * 5))  # and its next report comes later than that of the other
    found = job.steps()
    assert found is not None
    assert found.verdict.startswith("Rank 1 on b was last in 100% of the steps")


def test_steps_are_compared_after_epochs_of_unequal_length() -> None:
    job = JobMonitor(["a", "b"])
    joined = NUMBERS_PER_JOIN
    for epoch in range(100):
        job.add(report(0, epoch * joined + 1, [WAITING] * 20))
        job.add(report(1, epoch * joined + 1, [LATE] * (10 + epoch)))
    found = job.steps()
    assert found is not None
    assert found.verdict.startswith("Rank 1 on b was last in 100% of the steps")


def test_the_rank_for_which_the_others_wait_in_the_first_step_after_a_join_is_named() -> None:
    job = filled()
    job.add(report(0, NUMBERS_PER_JOIN, [WAITING]))
    for _ in range(5):
        job.add(RankReport(1, b"", b"", (10, StepTime(*[1.0] * 7)), (), 0.0, 1.0))
    found = job.steps()
    assert found is not None
    assert set(found.shares) == {0, 1}


def test_ranks_that_come_together_are_not_counted_as_last() -> None:
    job = JobMonitor(["a", "b"])
    job.add(report(0, 1, [LATE] * 10))
    job.add(report(1, 1, [LATE] * 10))
    job.steps()
    assert job.counts()[1] == {}
    assert (job.summary() or "").splitlines()[2].split()[-1] == "0%"


def test_a_library_that_fails_is_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = NodeMeter()

    def broken(*_: Any) -> Any:
        raise RuntimeError

    monkeypatch.setattr(psutil, "cpu_times", broken)
    assert meter.measure().cpu_percent is None
    assert NodeMeter().measure().metrics() == {}


def test_the_cores_of_this_host_are_measured() -> None:
    meter = NodeMeter()
    end_s = time.monotonic() + 0.2
    while time.monotonic() < end_s:
        pass
    busy = meter.measure().cpu_percent
    assert busy is not None
    assert 0 < busy <= 100


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        pytest.param(
            "[::1]", marks=pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this host has no IPv6")
        ),
    ],
)
def test_prometheus_reads_the_numbers_over_http(host: str) -> None:
    job = filled()
    job.steps()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    server = MetricsServer.started(job, port)
    assert server is not None
    try:
        with urllib.request.urlopen(f"http://{host}:{port}/metrics") as answer:
            lines = answer.read().decode().splitlines()
    finally:
        server.close()
    assert 'hvd_steps_total{rank="1"} 10.0' in lines
    assert 'hvd_last_total{rank="1"} 10.0' in lines
    assert 'hvd_host_usage{host="a",resource="gpu0"} 90.0' in lines
    values = dict(line.rsplit(" ", 1) for line in lines if line.startswith("hvd_step_seconds_total"))
    assert float(values['hvd_step_seconds_total{activity="data",rank="1"}']) == pytest.approx(0.3)


def test_a_port_that_is_taken_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken, caplog.at_level(logging.WARNING):
        port = taken.getsockname()[1]
        assert MetricsServer.started(filled(), port) is None
    assert f"HOROVOD_METRICS_PORT={port} cannot be served" in caplog.text
