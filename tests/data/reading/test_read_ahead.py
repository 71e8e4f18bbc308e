"""Work ahead of the consumer: in order, bounded, and gone when nobody wants it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from hvd_cluster.data.reading.read_ahead import ReadAhead, ReadAheadClosedError


def test_results_come_in_order_whichever_thread_is_faster() -> None:
    def work(index: int, stopped: Callable[[], bool]) -> int:
        time.sleep(0.02 if index % 3 == 0 else 0.0)
        return index

    ahead = ReadAhead(work, [1] * 20, num_threads=4, limit_bytes=8)
    try:
        assert [ahead.take() for _ in range(20)] == list(range(20))
        with pytest.raises(IndexError):
            ahead.take()
    finally:
        ahead.close()


def test_no_more_is_held_than_the_bound_allows() -> None:
    started: list[int] = []
    ahead = ReadAhead(lambda index, _: started.append(index), [10] * 50, num_threads=4, limit_bytes=30)
    try:
        deadline = time.monotonic() + 5
        while len(started) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)
        assert sorted(started) == [0, 1, 2]
        ahead.take()
        while len(started) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)
        assert sorted(started) == [0, 1, 2, 3]
    finally:
        ahead.close()


def test_a_piece_larger_than_the_bound_runs_alone() -> None:
    ahead = ReadAhead(lambda index, _: index, [100, 100, 100], num_threads=2, limit_bytes=10)
    try:
        assert [ahead.take() for _ in range(3)] == [0, 1, 2]
    finally:
        ahead.close()


def test_an_error_comes_where_its_result_would_have_come() -> None:
    def work(index: int, stopped: Callable[[], bool]) -> int:
        if index == 2:
            raise KeyError("two")
        return index

    ahead = ReadAhead(work, [1] * 4, num_threads=2, limit_bytes=100)
    try:
        assert [ahead.take(), ahead.take()] == [0, 1]
        with pytest.raises(KeyError, match="two"):
            ahead.take()
        assert ahead.take() == 3
    finally:
        ahead.close()


def test_closing_asks_long_work_to_stop_and_ends_the_threads() -> None:
    begun = threading.Event()

    def work(index: int, stopped: Callable[[], bool]) -> None:
        begun.set()
        while not stopped():
            time.sleep(0.005)

    ahead = ReadAhead(work, [1] * 4, num_threads=2, limit_bytes=100)
    assert begun.wait(5)
    ahead.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hvd-reader")]


def test_a_waiter_for_a_result_learns_that_it_was_closed() -> None:
    begun = threading.Event()
    results: list[object] = []

    def work(index: int, stopped: Callable[[], bool]) -> int:
        begun.set()
        while index and not stopped():
            time.sleep(0.005)
        return index

    def consume() -> None:
        try:
            while True:
                results.append(ahead.take())
        except ReadAheadClosedError:
            results.append("closed")

    ahead = ReadAhead(work, [1] * 100, num_threads=2, limit_bytes=100)
    consumer = threading.Thread(target=consume, daemon=True)
    consumer.start()
    assert begun.wait(5)
    ahead.close()
    consumer.join(30)
    assert not consumer.is_alive()
    # Never the result of a piece that returned early.
    assert results in ([0, "closed"], ["closed"])
    with pytest.raises(RuntimeError, match="stopped"):
        ahead.take()
