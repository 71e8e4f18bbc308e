"""Deadline on a clock of the test's own."""

from __future__ import annotations

import pytest

from hvd_cluster.engine.shared_memory import deadline
from hvd_cluster.engine.shared_memory.deadline import Deadline


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(deadline, "time", clock)
    return clock


def looks_until_it_ends(clock: Clock, waiting: Deadline, step_s: float) -> int:
    waiting.start()
    for number in range(1, 1000):
        clock.now_s += step_s
        try:
            waiting.check()
        except RuntimeError:
            return number
    raise AssertionError("it never ended")


def test_a_wait_ends_when_it_has_lasted_too_long(clock: Clock) -> None:
    waiting = Deadline(lambda *_: None, 2.0, lambda: [3])
    assert looks_until_it_ends(clock, waiting, 0.25) == 9


def test_every_wait_begins_again(clock: Clock) -> None:
    waiting = Deadline(lambda *_: None, 2.0, lambda: [3])
    for _ in range(3):
        clock.now_s += 100.0
        assert looks_until_it_ends(clock, waiting, 0.25) == 9


def test_time_in_which_this_rank_did_not_run_does_not_count(clock: Clock) -> None:
    waiting = Deadline(lambda *_: None, 2.0, lambda: [3])
    waiting.start()
    clock.now_s += 0.25
    waiting.check()
    clock.now_s += 3600.0
    waiting.check()
    clock.now_s += 0.5
    waiting.check()
    clock.now_s += 0.5
    with pytest.raises(RuntimeError):
        waiting.check()


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3 of this host did not wake up within 2 s: it is stopped or overloaded. "),
        ([3, 5], "ranks 3, 5 of this host did not wake up within 2 s: they are stopped or overloaded. "),
        ([], "the other ranks of this host did not wake up within 2 s: one of them is stopped or overloaded. "),
    ],
)
def test_the_error_says_who_did_not_do_what(clock: Clock, ranks: list[int], text: str) -> None:
    waiting = Deadline(lambda *_: None, 2.0, lambda: ranks, "wake up")
    waiting.start()
    for _ in range(2):
        clock.now_s += 1.0
        waiting.check()
    clock.now_s += 0.25
    with pytest.raises(RuntimeError) as caught:
        waiting.check()
    assert str(caught.value) == text + "HOROVOD_GLOO_TIMEOUT_SECONDS sets how long to wait"
