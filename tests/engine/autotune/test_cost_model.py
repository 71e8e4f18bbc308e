"""Costs fitted to known buckets, and steps predicted from known costs."""

from __future__ import annotations

import pytest

from hvd_cluster.engine.autotune.cost_model import Pattern, TransportCost
from hvd_cluster.engine.autotune.observation import Observation, Parameters
from hvd_cluster.engine.autotune.steps import StepWatcher

TRUE = TransportCost(2e-3, 1e-9, 3e-6)


def test_the_fit_finds_latency_bandwidth_and_handling_in_spite_of_outliers() -> None:
    buckets = [
        (size, count, TRUE.seconds(size, count)) for size in (4, 10_000, 1 << 20, 50 << 20) for count in (1, 7, 100)
    ]
    found = TransportCost.fit([*buckets, *buckets, *((size, count, 50 * t) for size, count, t in buckets)])
    assert found.latency_s == pytest.approx(2e-3, rel=1e-6)
    assert found.seconds_per_byte == pytest.approx(1e-9, rel=1e-6)
    assert found.seconds_per_request == pytest.approx(3e-6, rel=1e-6)


def test_no_cost_is_negative() -> None:
    # Larger buckets took less time: neither bytes nor requests can explain it.
    found = TransportCost.fit([(100, 1, 2.0), (200, 2, 1.0)])
    assert min(found.latency_s, found.seconds_per_byte, found.seconds_per_request) >= 0
    assert TransportCost.fit([]).seconds(1, 1) == 0
    assert TransportCost.fit([(100, 1, 2.0)]).seconds(100, 1) == pytest.approx(2.0)


def test_a_step_is_its_reductions_one_after_the_other_beside_the_submissions() -> None:
    pattern = Pattern([(0.0, 10, 1), (0.1, 10, 1), (1.0, 10, 1)], negotiation_s=0.01, rest_s=0.5)
    cost = TransportCost(0.2, 0.0, 0.0)
    # Each alone: 0.01..0.21, 0.21..0.41, 1.01..1.21
    assert pattern.step_s(Parameters(0, 0.0), cost) == pytest.approx(1.21 + 0.5)
    # The first two together at 0.15: 0.16..0.36
    assert pattern.step_s(Parameters(100, 150.0), TransportCost(2.0, 0.0, 0.0)) == pytest.approx(0.16 + 4.0 + 0.5)
    # Nobody waits longer than the last submission, which somebody waits for.
    assert pattern.step_s(Parameters(100, 60_000.0), cost) == pytest.approx(1.21 + 0.5)
    # The threshold splits what has come together.
    assert pattern.step_s(Parameters(20, 60_000.0), cost) == pytest.approx(1.01 + 0.4 + 0.5)


def test_steps_are_separated_by_names_that_repeat() -> None:
    watcher = StepWatcher()
    finished = []
    for step in range(4):
        t = 10.0 * step
        for bucket in (
            Observation([("a", 100, t), ("b", 50, t + 0.5)], t + 1.0, t + 2.0),
            Observation([("c", 25, t + 0.75)], t + 1.0, t + 3.5),
        ):
            done = watcher.add(bucket)
            if done is not None:
                finished.append(done)
    assert len(finished) == 3
    for record in finished:
        assert record.took_s == pytest.approx(10.0)
        assert record.rest_s == pytest.approx(6.5)
        # The second bucket had to wait for the first.
        assert record.buckets == [(150, 2, pytest.approx(1.0)), (25, 1, pytest.approx(1.5))]
    pattern = watcher.pattern()
    assert list(pattern.arrivals) == [(0.0, 100, 1), (0.5, 50, 1), (0.75, 25, 1)]
    assert pattern.negotiation_s == pytest.approx(0.25)
    assert pattern.rest_s == pytest.approx(6.5)


def test_many_arrivals_are_merged_without_losing_a_byte() -> None:
    watcher = StepWatcher()
    for step in range(2):
        requests = [(f"g{i}", i, step * 10.0 + i / 1000) for i in range(1000)]
        watcher.add(Observation(requests, step * 10.0 + 2, step * 10.0 + 3))
    arrivals = watcher.pattern().arrivals
    assert len(arrivals) <= 300
    assert sum(num_bytes for _, num_bytes, _ in arrivals) == sum(range(1000))
    assert sum(count for _, _, count in arrivals) == 1000
