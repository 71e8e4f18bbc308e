from __future__ import annotations

import time

import pytest

import hvd_cluster.torch as hvd
from hvd_cluster.estimators.run.epoch_shares import EpochShares
from hvd_cluster.monitor.step_clock import ACTIVITIES, DATA, SAVE, step_clock


def step(activity: int) -> None:
    with step_clock.span(activity):
        time.sleep(0.02)
    step_clock.end_step()


@pytest.fixture
def alone():
    hvd.init()
    yield
    hvd.shutdown()


@pytest.mark.usefixtures("alone")
def test_each_epoch_has_the_shares_of_its_own_steps():
    step(DATA)
    shares = EpochShares(measures_host=False)
    assert set(shares.take().values()) == {0.0}
    for activity in (SAVE, DATA):
        step(activity)
        step(activity)
        found = shares.take()
        assert list(found) == list(ACTIVITIES)
        assert sum(found.values()) == pytest.approx(1)
        assert max(found, key=found.get) == ACTIVITIES[activity]


@pytest.mark.usefixtures("alone")
def test_one_rank_of_a_host_measures_it():
    assert EpochShares(measures_host=False).usage() == {}
    pytest.importorskip("psutil", reason="the usage of hosts needs psutil")
    shares = EpochShares(measures_host=True)
    time.sleep(0.1)  # the kernel counts in steps of 10 ms
    ((_, numbers),) = shares.usage().items()
    assert {"cpu_percent", "memory_percent"} <= numbers.keys()
