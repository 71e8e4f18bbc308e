from __future__ import annotations

import pytest

from hvd_cluster.launch.elastic.blacklist import Blacklist


def test_a_failed_host_is_kept_out_forever_without_a_cool_down() -> None:
    blacklist = Blacklist(None, lambda: 0.0)
    assert not blacklist.holds("a", 0.0)
    assert blacklist.add("a", 0.0) is None
    assert blacklist.holds("a", 1e9)
    assert not blacklist.holds("b", 1e9)
    assert blacklist.hosts() == ["a"]


def test_a_cool_down_doubles_with_each_failure_and_is_bounded() -> None:
    blacklist = Blacklist((10.0, 50.0), lambda: 0.5)
    now_s, waits = 0.0, []
    for _ in range(4):
        wait_s = blacklist.add("a", now_s)
        assert wait_s is not None
        waits.append(wait_s)
        assert blacklist.holds("a", now_s + wait_s - 0.1)
        now_s += wait_s
        assert not blacklist.holds("a", now_s)
    assert waits == [15.0, 25.0, 45.0, 50.0]


def test_the_workers_of_one_host_that_fail_together_count_once() -> None:
    blacklist = Blacklist((10.0, 50.0), lambda: 0.0)
    assert blacklist.add("a", 0.0) == 10.0
    assert blacklist.add("a", 4.0) == pytest.approx(6.0)
    assert blacklist.add("a", 11.0) == pytest.approx(20.0)
