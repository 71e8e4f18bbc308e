"""How the controller of an elastic job ends a worker, which is played by the test."""

from __future__ import annotations

import time
from typing import cast

import pytest

from hvd_cluster.launch.elastic.elastic_worker import LEAVE_GRACE_S, ElasticWorker
from hvd_cluster.launch.elastic.policy import Phase
from hvd_cluster.launch.worker_group import STOP_GRACE_S, Worker


class Signals:
    """A worker that ignores what it gets."""

    def __init__(self) -> None:
        self.received: list[str] = []
        self.place = "process 407 on node-b"

    def write_stack(self) -> None:
        self.received.append("stack")

    def terminate(self) -> None:
        self.received.append("SIGTERM")

    def kill(self) -> None:
        self.received.append("SIGKILL")


@pytest.fixture
def now_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize("is_leaving", [False, True])
def test_a_stop_takes_no_longer_for_a_worker_that_is_leaving(is_leaving: bool, now_s: list[float]) -> None:
    signals = Signals()
    member = ElasticWorker(0, "w", "localhost", 0, 0)
    member.worker = cast(Worker, signals)
    if is_leaving:
        member.expect_exit()
    member.stop()
    member.stop()
    assert signals.received == ["SIGTERM"]
    now_s[0] += STOP_GRACE_S + 0.1
    member.kill_after_grace()
    assert signals.received == ["SIGTERM", "SIGKILL"]


def test_a_stop_gives_a_leaving_worker_no_more_time(now_s: list[float]) -> None:
    signals = Signals()
    member = ElasticWorker(0, "w", "localhost", 0, 0)
    member.worker = cast(Worker, signals)
    member.expect_exit()
    now_s[0] += LEAVE_GRACE_S - 1
    member.stop()
    now_s[0] += 1.1
    member.kill_after_grace()
    assert signals.received == ["SIGTERM", "SIGKILL"]


@pytest.mark.parametrize("phase", [Phase.RUNNING, Phase.WAITING])
def test_a_worker_that_hangs_in_its_world_is_named_and_writes_its_stack(
    phase: Phase, caplog: pytest.LogCaptureFixture
) -> None:
    signals = Signals()
    member = ElasticWorker(0, "w", "localhost", 0, 0)
    member.worker, member.rank, member.phase = cast(Worker, signals), 3, phase
    member.stop(shows_stack=True)
    hangs = phase is Phase.RUNNING
    assert signals.received == ["stack"] * hangs + ["SIGTERM"]
    assert caplog.messages == ["stopping rank 3 (process 407 on node-b), which has not left its world"] * hangs
