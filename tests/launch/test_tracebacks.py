from __future__ import annotations

import queue

from hvd_cluster.launch.tracebacks import Tracebacks

HEADLINE = "Traceback (most recent call last):"


def test_a_traceback_is_passed_on_when_its_rank_lives_on() -> None:
    lines: queue.SimpleQueue[tuple[int, str, str]] = queue.SimpleQueue()
    held = Tracebacks(lambda *line: lines.put(line), hold_s=0.05)
    held(0, "stderr", HEADLINE)
    held(0, "stdout", "a result")
    held(0, "stderr", "ValueError: x")
    assert [lines.get(timeout=30) for _ in range(3)] == [
        (0, "stdout", "a result"),
        (0, "stderr", HEADLINE),
        (0, "stderr", "ValueError: x"),
    ]
    assert held.take([0]) == []


def test_equal_tracebacks_are_taken_as_one_and_the_rest_is_passed_on() -> None:
    lines: list[tuple[int, str, str]] = []
    held = Tracebacks(lambda *line: lines.append(line))
    for rank in (3, 0, 1, 2):
        held(rank, "stderr", HEADLINE)
        held(rank, "stderr", "KeyError: 1" if rank == 1 else "ValueError: x")
    assert held.take([3, 0, 1]) == [([0, 3], f"{HEADLINE}\nValueError: x"), ([1], f"{HEADLINE}\nKeyError: 1")]
    held.close()
    assert lines == [(2, "stderr", HEADLINE), (2, "stderr", "ValueError: x")]


def test_the_traceback_of_an_exception_group_is_held_too() -> None:
    lines: list[tuple[int, str, str]] = []
    held = Tracebacks(lambda *line: lines.append(line))
    headline = f"  + Exception Group {HEADLINE}"
    held(0, "stderr", headline)
    assert held.take([0]) == [([0], headline)]
    assert lines == []
