"""Semaphores and barriers in shared memory, between real processes."""

from __future__ import annotations

import mmap
import os
import signal
import threading
import time

import pytest

from hvd_cluster.engine.shared_memory.deadline import Deadline
from hvd_cluster.engine.shared_memory.semaphores import STRIDE_BYTES, Barrier, Semaphores


def ten_seconds() -> Deadline:
    return Deadline(lambda *_: None, 10.0, list)


def in_children(count: int, work) -> list[int]:  # type: ignore[no-untyped-def]
    children = []
    for index in range(count):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                work(index)
                code = 0
            finally:
                os._exit(code)
        children.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]


def test_a_wait_is_over_when_another_process_posts() -> None:
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    semaphores = Semaphores(memory, 0, 2, create=True)

    def work(index: int) -> None:
        mine = Semaphores(memory, 0, 2, create=False)
        for _ in range(1000):
            mine.post(1 - index)
            mine.wait(index, ten_seconds())

    assert in_children(2, work) == [0, 0]
    semaphores.release()
    memory.close()


def test_a_wait_that_lasts_looks_around_and_can_be_given_up() -> None:
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    semaphores = Semaphores(memory, 0, 1, create=True)
    looks = []

    def look(_: object = None) -> None:
        looks.append(time.monotonic())
        if len(looks) == 3:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        semaphores.wait(0, Deadline(look, 10.0, list))
    assert len(looks) == 3
    semaphores.post(0)
    semaphores.wait(0, ten_seconds())
    semaphores.release()


def test_each_wait_that_blocks_begins_its_deadline_again() -> None:
    class Counted(Deadline):
        num_begun = 0

        def start(self) -> None:
            self.num_begun += 1
            super().start()

    memory = mmap.mmap(-1, mmap.PAGESIZE)
    semaphores = Semaphores(memory, 0, 1, create=True)
    deadline = Counted(lambda *_: semaphores.post(0), 10.0, list)
    semaphores.wait(0, deadline)
    semaphores.wait(0, deadline)
    assert deadline.num_begun == 2
    semaphores.post(0)
    semaphores.wait(0, deadline)  # and this one does not block
    assert deadline.num_begun == 2
    semaphores.release()


def test_a_wait_that_signals_interrupt_all_the_time_looks_around_too() -> None:
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    semaphores = Semaphores(memory, 0, 1, create=True)
    handled = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
    try:
        with pytest.raises(RuntimeError, match="within 0.5 s"):
            semaphores.wait(0, Deadline(lambda *_: None, 0.5, list))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handled)
    semaphores.release()


@pytest.mark.parametrize("num_ranks", [2, 3, 5, 8])
def test_no_one_passes_a_barrier_before_the_last_one_has_come(num_ranks: int) -> None:
    count = Barrier.num_semaphores(num_ranks)
    memory = mmap.mmap(-1, 2 * mmap.PAGESIZE + count * STRIDE_BYTES)
    Semaphores(memory, 0, count, create=True)
    counters = count * STRIDE_BYTES

    def work(index: int) -> None:
        barrier = Barrier(Semaphores(memory, 0, count, create=False), 0, index, num_ranks)
        for turn in range(1, 60):
            memory[counters + index] = turn
            barrier.wait(ten_seconds())
            seen = list(memory[counters : counters + num_ranks])
            # The others may be one barrier ahead, never behind.
            assert all(other in (turn, turn + 1) for other in seen), (turn, seen)

    assert in_children(num_ranks, work) == [0] * num_ranks


@pytest.mark.parametrize(("num_ranks", "late"), [(2, [0]), (3, [2]), (6, [2, 5])])
def test_who_has_not_come_to_a_barrier_is_known(num_ranks: int, late: list[int]) -> None:
    count = Barrier.num_semaphores(num_ranks)
    memory = mmap.mmap(-1, mmap.PAGESIZE + count * STRIDE_BYTES)
    semaphores = Semaphores(memory, 0, count, create=True)
    barriers = [Barrier(semaphores, 0, index, num_ranks) for index in range(num_ranks)]
    for _ in range(3):  # of those that have come before, too
        threads = [threading.Thread(target=barrier.wait, args=(ten_seconds(),)) for barrier in barriers]
        for index, thread in enumerate(threads):
            if index not in late:
                thread.start()
        first = next(index for index in range(num_ranks) if index not in late)
        deadline_s = time.monotonic() + 10
        while barriers[first].late() != late and time.monotonic() < deadline_s:
            time.sleep(0.001)
        assert barriers[first].late() == late
        for index in late:
            threads[index].start()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize(("num_ranks", "posts"), [(3, 1), (3, 2), (3, 3), (4, 2), (6, 1), (6, 2), (6, 4)])
def test_who_stands_still_during_a_barrier_is_known_and_no_one_that_waits_for_it(num_ranks: int, posts: int) -> None:
    goes_on = threading.Event()

    class Standing(Semaphores):
        def wait(self, index: int, deadline: Deadline) -> None:
            self.waits += 1
            if self.waits == posts:
                goes_on.wait(20.0)
            super().wait(index, deadline)

        waits = 0

    count = Barrier.num_semaphores(num_ranks)
    memory = mmap.mmap(-1, mmap.PAGESIZE + count * STRIDE_BYTES)
    semaphores = Semaphores(memory, 0, count, create=True)
    standing = Standing(memory, 0, count, create=False)
    barriers = [Barrier(standing if rank == 1 else semaphores, 0, rank, num_ranks) for rank in range(num_ranks)]

    def twice(barrier: Barrier) -> None:
        for _ in range(2):
            barrier.wait(ten_seconds())

    threads = [threading.Thread(target=twice, args=(barrier,)) for barrier in barriers]
    for thread in threads:
        thread.start()
    others = [barrier for rank, barrier in enumerate(barriers) if rank != 1]
    deadline_s = time.monotonic() + 10
    while any(barrier.late() != [1] for barrier in others) and time.monotonic() < deadline_s:
        time.sleep(0.001)
    assert [barrier.late() for barrier in others] == [[1]] * len(others)
    goes_on.set()
    for thread in threads:
        thread.join()
