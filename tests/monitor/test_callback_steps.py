"""Where the steps of compiled functions end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from hvd_cluster.monitor.callback_steps import CallbackSteps
from hvd_cluster.monitor.step_clock import StepClock


def in_thread(function: Callable[[], Any]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def reduce(steps: CallbackSteps) -> None:
    with steps.callback(ends_step=True):
        pass


def test_a_call_that_reduces_twice_makes_two_steps() -> None:
    clock = StepClock()
    steps = CallbackSteps(clock)
    with steps.call(is_step=lambda: False, is_async=False):
        in_thread(lambda: reduce(steps))
        in_thread(lambda: reduce(steps))
    assert clock.num_steps == 2
    assert clock.thread == threading.get_ident()


def test_a_callback_after_its_call_has_returned_makes_one_step() -> None:
    clock = StepClock()
    steps = CallbackSteps(clock)
    for _ in range(3):
        with steps.call(is_step=lambda: False, is_async=True):
            pass
        in_thread(lambda: reduce(steps))
    assert clock.num_steps == 3


def test_a_callback_outside_of_a_known_call_makes_a_step() -> None:
    clock = StepClock()
    in_thread(lambda: reduce(CallbackSteps(clock)))
    assert clock.num_steps == 1


def test_a_call_without_a_reduction_is_a_step_only_if_the_optimizer_says_so() -> None:
    clock = StepClock()
    steps = CallbackSteps(clock)
    for is_step in (False, True):
        with steps.call(is_step=lambda is_step=is_step: is_step, is_async=False):  # type: ignore[misc]
            pass
    assert clock.num_steps == 1
