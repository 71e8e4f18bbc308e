"""The clock of a step: every moment belongs to one activity."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from itertools import count

import pytest

from hvd_cluster.monitor import step_clock as module
from hvd_cluster.monitor.step_clock import COMPUTE, DATA, OPTIMIZER, SAVE, StepClock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[StepClock]:
    """A clock that is one second later each time it is read, after its first step."""
    seconds = count()
    monkeypatch.setattr(module.time, "monotonic", lambda: float(next(seconds)))
    made = StepClock()
    made.restart()
    made.end_step()
    yield made
    monkeypatch.undo()


def test_the_times_of_a_step_add_up_and_its_activities_exclude_each_other(clock: StepClock) -> None:
    with clock.span(DATA), clock.span(SAVE):
        pass
    with clock.span(OPTIMIZER):
        pass
    clock.end_step()
    (step,) = clock.recent()
    # Between the steps 1 s, data 1 + 1 s around a second of saving, computation 1 s, the optimizer 1 s, then 1 s more.
    assert step == (2.0, 2.0, 0.0, 0.0, 1.0, 1.0, 1.0)
    assert step.total_s == 7.0


def test_without_a_wait_for_data_the_time_before_the_optimizer_is_computation(clock: StepClock) -> None:
    with clock.span(OPTIMIZER):
        pass
    clock.end_step()
    (step,) = clock.recent()
    assert (step.compute_s, step.other_s) == (2.0, 0.0)


def test_a_wait_is_divided_where_all_ranks_had_come(clock: StepClock) -> None:
    with clock.span(DATA):
        pass
    clock.note_wait(begun_s=4.0, decided_s=4.25)  # noted at 5
    clock.note_wait(begun_s=5.0, decided_s=0.0)  # it has failed, noted at 6
    clock.note_wait(begun_s=6.0, decided_s=1.0)  # all had come before, noted at 7
    clock.end_step()
    (step,) = clock.recent()
    assert (step.late_s, step.transfer_s) == (1.25, 1.75)
    assert step.compute_s == 1.0  # from 7 to 8


def test_the_first_step_is_left_out_and_the_others_are_numbered_from_it() -> None:
    clock = StepClock()
    clock.restart()
    for _ in range(4):
        clock.end_step()
    assert clock.num_steps == 4
    assert len(clock.recent()) == 3
    assert len(clock.recent(2)) == 2
    assert list(clock.since(0)) == [1, 2, 3]
    assert list(clock.since(3)) == [3]
    assert clock.since(4) == {}
    assert clock.totals[0] == 3
    clock.restart()
    assert (clock.num_steps, clock.recent(), clock.totals[0]) == (0, [], 0)


def test_after_a_join_the_same_steps_have_equal_numbers() -> None:
    clocks = []
    for num_steps in (4, 6):
        clock = StepClock()
        clock.restart()
        for _ in range(num_steps):
            clock.end_step()
        clock.end_join()
        for _ in range(2):
            clock.end_step()
        clocks.append(clock)
    early, late = clocks
    assert early.since(6).keys() == late.since(6).keys()
    assert len(early.since(6)) == 2
    assert (early.num_steps, late.num_steps) == (6, 8)
    assert (early.totals[0], late.totals[0]) == (5, 7)
    early.restart()
    early.end_step()
    early.end_step()
    assert list(early.since(0)) == [1]


def test_no_more_steps_are_kept_than_fit() -> None:
    clock = StepClock()
    for _ in range(3000):
        clock.end_step()
    assert len(clock.recent()) == 2048
    assert min(clock.since(0)) == 3000 - 2048
    assert clock.totals[0] == 2999


def test_other_threads_are_ignored_unless_the_training_thread_waits_for_them(clock: StepClock) -> None:
    def in_thread(function: object) -> None:
        assert callable(function)
        thread = threading.Thread(target=function)
        thread.start()
        thread.join()

    before = clock.activity
    in_thread(lambda: clock.enter(SAVE))
    assert clock.activity == before

    def callback() -> None:
        with clock.in_this_thread():
            clock.leave(clock.enter(SAVE))

    in_thread(callback)
    clock.end_step()
    assert clock.recent()[0].save_s == 1.0


def test_the_thread_that_ends_a_step_is_the_one_that_trains() -> None:
    clock = StepClock()

    def train() -> None:
        clock.restart()
        clock.end_step()
        with clock.span(DATA):
            time.sleep(0.01)
        clock.end_step()

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert clock.thread == thread.ident
    assert clock.recent()[0].data_s >= 0.01
    assert clock.enter(COMPUTE) == -1


def test_the_end_of_the_data_is_not_followed_by_computation(clock: StepClock) -> None:
    for items in (iter([1]), iter([])):  # the last batch of an epoch, and the wait that finds its end
        before = clock.enter(DATA)
        has_item = next(items, None) is not None
        clock.leave(before, is_end_of_data=not has_item)
        if has_item:
            clock.end_step()
    with clock.span(DATA):
        pass
    clock.end_step()
    step = clock.recent()[-1]
    # Before and after the wait that finds the end, then data, and computation after them.
    assert (step.other_s, step.data_s, step.compute_s) == (2.0, 2.0, 1.0)


def test_threads_that_stand_in_may_overlap(clock: StepClock) -> None:
    inside, outside = threading.Event(), threading.Event()

    def callback() -> None:
        with clock.in_this_thread():
            inside.set()
            outside.wait(10)

    thread = threading.Thread(target=callback)
    with clock.in_this_thread():
        thread.start()
        assert inside.wait(10)
    outside.set()
    thread.join()
    assert clock.enter(SAVE) >= 0
    assert clock.thread == threading.get_ident()
