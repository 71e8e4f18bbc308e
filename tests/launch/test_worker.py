from __future__ import annotations

import pickle
import sys
import threading

import pytest

from hvd_cluster.launch.call import pack
from hvd_cluster.launch.outcome import Outcome
from hvd_cluster.launch.worker import perform
from hvd_cluster.topology import Topology


def outcome_of(fn: object) -> Outcome:
    return perform(pack(fn), Topology(rank=2, size=3, host="h"))  # type: ignore[arg-type]


def test_a_value_comes_back() -> None:
    outcome = outcome_of(lambda: {"a": 1})
    assert outcome.ok
    assert pickle.loads(outcome.value or b"") == {"a": 1}
    assert (outcome.rank, outcome.host) == (2, "h")


@pytest.mark.parametrize("code", [None, 0])
def test_sys_exit_with_zero_is_a_return_of_none(code: int | None) -> None:
    outcome = outcome_of(lambda: sys.exit(code))
    assert outcome.ok
    assert pickle.loads(outcome.value or b"") is None


@pytest.mark.parametrize(("code", "exit_code"), [(3, 3), (-1, 255), ("words", 1)])
def test_sys_exit_with_anything_else_is_a_failure_with_that_code(code: object, exit_code: int) -> None:
    outcome = outcome_of(lambda: sys.exit(code))  # type: ignore[arg-type]
    assert not outcome.ok
    assert outcome.exit_code == exit_code
    assert outcome.error is not None
    assert str(code) in outcome.error.traceback_text


def test_a_result_that_cannot_be_pickled_names_the_rank_and_the_type() -> None:
    outcome = outcome_of(threading.Lock)
    assert outcome.error is not None
    assert "the result of rank 2, of type lock, cannot be pickled" in outcome.error.message
    assert "return plain data" in outcome.error.message
    assert "launch/worker.py" not in outcome.error.traceback_text


def test_an_interrupt_inside_the_function_is_reported_like_any_exception() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    outcome = outcome_of(interrupted)
    assert outcome.error is not None
    assert outcome.error.type_name == "KeyboardInterrupt"
