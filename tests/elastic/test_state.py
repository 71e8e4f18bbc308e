from __future__ import annotations

import threading
from typing import Any

import pytest

from hvd_cluster.elastic.state import HostUpdateResult, ObjectState, State
from hvd_cluster.errors import HostsUpdatedInterrupt


def alone(obj: Any) -> Any:
    """A broadcast in a world of one."""
    return obj


def state(**values: Any) -> ObjectState:
    return ObjectState(alone, lambda: 0, **values)


def test_values_go_back_to_the_last_commit() -> None:
    made = state(epoch=0, history=[])
    made.epoch = 3
    made.history.append(1)
    made.commit()
    made.epoch = 4
    made.history.append(2)
    made.restore()
    assert (made.epoch, made.history) == (3, [1])
    made.history.append(5)  # what was restored is no part of what was saved
    made.restore()
    assert made.history == [1]


class Log:
    """Can be pickled, but not copied."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __deepcopy__(self, memo: object) -> Log:
        raise RuntimeError("this object cannot be copied")


def test_a_value_that_can_only_be_pickled_goes_back_to_the_last_commit() -> None:
    made = state(log=Log())
    made.log.lines.append("one")
    made.commit()
    made.log.lines.append("two")
    made.restore()
    assert made.log.lines == ["one"]


def test_a_value_that_cannot_be_copied_at_all_is_refused() -> None:
    made = state(lock=None)
    made.lock = threading.Lock()
    with pytest.raises(TypeError, match="cannot pickle"):
        made.commit()


def test_a_state_takes_over_what_rank_0_has_and_keeps_it() -> None:
    made = ObjectState(lambda _obj: {"epoch": 7}, lambda: 1, epoch=0)
    made.sync()
    assert made.epoch == 7
    made.epoch = 9
    made.restore()
    assert made.epoch == 7


def test_a_change_of_the_hosts_interrupts_once_at_the_next_check() -> None:
    made = state(epoch=0)
    made.check_host_updates()
    made.on_hosts_updated(1.0, HostUpdateResult.added)
    with pytest.raises(HostsUpdatedInterrupt) as caught:
        made.commit()
    assert not caught.value.skip_sync
    made.commit()
    made.on_hosts_updated(1.0, HostUpdateResult.added)  # old news
    made.commit()


@pytest.mark.parametrize(
    ("changes", "skips"),
    [
        ([HostUpdateResult.removed], True),
        ([HostUpdateResult.removed, HostUpdateResult.added], False),
        ([HostUpdateResult.mixed], False),
    ],
)
def test_only_removals_need_no_sync(changes: list[HostUpdateResult], skips: bool) -> None:
    made = state(epoch=0)
    for at_s, change in enumerate(changes, 1):
        made.on_hosts_updated(float(at_s), change)
    with pytest.raises(HostsUpdatedInterrupt) as caught:
        made.check_host_updates()
    assert caught.value.skip_sync is skips


def test_what_rank_0_has_heard_counts_for_all() -> None:
    made = ObjectState(lambda _news: (0.0, 5.0, 1), lambda: 1, epoch=0)
    with pytest.raises(HostsUpdatedInterrupt):
        made.check_host_updates()


def test_a_new_world_forgets_old_news_and_calls_back_in_order() -> None:
    made = state(epoch=0)
    called: list[str] = []
    made.register_reset_callbacks([lambda: called.append("a"), lambda: called.append("b")])
    made.on_hosts_updated(1.0, HostUpdateResult.added)
    made.on_reset()
    made.commit()
    assert called == ["a", "b"]


def test_news_of_a_new_world_that_came_before_its_reset_is_kept_and_older_news_is_not() -> None:
    made = state(epoch=0)
    made.on_hosts_updated(1.0, HostUpdateResult.added)
    made.begin_world(2.0)
    made.on_hosts_updated(3.0, HostUpdateResult.added)
    made.on_reset()
    with pytest.raises(HostsUpdatedInterrupt):
        made.commit()
    made.begin_world(4.0)
    made.on_hosts_updated(3.5, HostUpdateResult.added)  # it was on its way
    made.on_reset()
    made.commit()


@pytest.mark.parametrize("method", ["save", "restore", "sync"])
def test_a_subclass_must_implement_its_methods(method: str) -> None:
    with pytest.raises(NotImplementedError, match="Mine does not implement"):
        getattr(type("Mine", (State,), {})(alone, lambda: 0), method)()
