from __future__ import annotations

import pytest

from hvd_cluster.elastic import loop
from hvd_cluster.elastic.loop import run_fn
from hvd_cluster.elastic.state import ObjectState
from hvd_cluster.errors import HorovodInternalError, HostsUpdatedInterrupt


class Recorder(ObjectState):
    """Notes what the loop does with it."""

    def __init__(self) -> None:
        super().__init__(lambda obj: obj, lambda: 0, step=0)
        self.calls: list[str] = []

    def sync(self) -> None:
        self.calls.append("sync")
        super().sync()

    def restore(self) -> None:
        self.calls.append("restore")
        super().restore()

    def reset(self) -> None:
        self.calls.append("reset")


def run(*endings: BaseException | str) -> list[str]:
    """What happens around a function whose calls end so, one after the other."""
    state, left = Recorder(), list(endings)

    def train(state: Recorder, argument: int) -> str:
        assert argument == 5
        state.calls.append("call")
        ending = left.pop(0)
        if isinstance(ending, BaseException):
            raise ending
        return ending

    assert run_fn(train, lambda: state.calls.append("rejoin"))(state, 5) == endings[-1]
    return state.calls


def test_a_function_that_nothing_disturbs_is_called_once() -> None:
    assert run("done") == ["sync", "call"]


def test_workers_that_came_are_met_and_made_equal() -> None:
    assert run(HostsUpdatedInterrupt(), "done") == ["sync", "call", "rejoin", "reset", "sync", "call"]


def test_workers_that_left_leave_equal_ones() -> None:
    assert run(HostsUpdatedInterrupt(skip_sync=True), "done") == ["sync", "call", "rejoin", "reset", "call"]


def test_a_failed_collective_of_a_job_that_is_not_elastic_is_an_error() -> None:
    with pytest.raises(HorovodInternalError, match="gone"):
        run(HorovodInternalError("gone"), "never")


def test_an_error_of_the_user_s_concerns_no_one_else() -> None:
    with pytest.raises(KeyError):
        run(KeyError("mine"), "never")


class ElasticJob:
    """Stands for the notifications of an elastic job."""

    is_elastic = True
    must_sync = has_changed = False

    def ignore(self, *_: object, **__: object) -> None:
        """Do nothing."""

    listen = leave_world = report_state = begin_world = forget = ignore


def test_what_was_loaded_before_the_first_synchronization_outlives_its_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lossy(Recorder):
        def sync(self) -> None:
            if not self.calls:
                self.calls.append("lost")
                raise HorovodInternalError("a peer has died")
            super().sync()

    monkeypatch.setattr(loop, "notifications", ElasticJob())
    state = Lossy()
    state.step = 17  # from a checkpoint
    assert run_fn(lambda state: state.step, lambda: None)(state) == 17
    assert state.calls == ["lost", "restore", "reset", "sync"]
