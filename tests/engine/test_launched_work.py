"""Work that a device never completes, completes late, or fails: the report, the time limit, the error on all ranks."""

from __future__ import annotations

import io
import os
import time
from typing import Any

import pytest
import torch

from hvd_cluster.engine.launched_work import Launch, LaunchedWork
from hvd_cluster.engine.messages import Wait, WaitState
from hvd_cluster.launch import local
from hvd_cluster.settings import Settings

ENV = {
    "OMP_NUM_THREADS": "1",
    "HOROVOD_SHARED_MEMORY": "0",
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "1",
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "4",
}


class Device:
    """Work and an event of a device; the test says when they happen."""

    def __init__(self) -> None:
        self.has_completed = False
        self.is_reached = True

    def is_complete(self) -> bool:
        return self.has_completed

    def query(self) -> bool:
        return self.is_reached


def launch(launched_work: LaunchedWork, number: int, name: str) -> Device:
    device: Any = Device()
    launched_work.add(number, [(0, name)], Launch([device], [device], 0.0, is_done=True))
    return device  # type: ignore[no-any-return]


def test_buckets_that_complete_in_another_order_are_forgotten_one_by_one() -> None:
    launched_work = LaunchedWork(Settings())
    devices = [launch(launched_work, number, name) for number, name in enumerate("abc", 1)]
    for index, left in [(2, "ab"), (0, "b"), (1, "")]:
        devices[index].has_completed = True
        launched_work.poll()
        assert [wait.key[1] for wait in launched_work.waits()] == list(left)
    assert launched_work.next_poll_s is None


def test_finished_buckets_are_forgotten_without_asking_a_device() -> None:
    launched_work = LaunchedWork(Settings())
    launches = [Launch([], [], None) for _ in range(2)]
    for number, each in enumerate(launches, 1):
        launched_work.add(number, [(0, str(number))], each)
    launch(launched_work, 3, "on a device").has_completed = True
    for finished, left in [(1, 3), (0, 1)]:
        launches[finished].finish()
        launched_work.drop_finished()
        assert len(launched_work.waits()) == left


def test_a_bucket_of_the_same_name_is_recognized_by_its_number() -> None:
    launched_work = LaunchedWork(Settings())
    launch(launched_work, 7, "gradient")
    launched_work.poll()
    assert launched_work.state(Wait((0, "gradient"), 7)) == WaitState.NOT_COMPLETE
    assert launched_work.state(Wait((0, "gradient"), 6)) is None
    assert launched_work.state(Wait((0, "gradient"), 8)) == WaitState.NOT_LAUNCHED


def test_the_state_of_a_bucket_does_not_need_a_poll() -> None:
    launched_work = LaunchedWork(Settings())
    device = launch(launched_work, 1, "a")
    device.is_reached = False
    assert launched_work.state(Wait((0, "a"), 1)) == WaitState.NOT_REACHED
    device.is_reached = True
    assert launched_work.state(Wait((0, "a"), 1)) == WaitState.NOT_COMPLETE
    device.has_completed = True
    assert launched_work.state(Wait((0, "a"), 1)) is None


def test_a_device_that_computes_the_inputs_is_busy_and_not_late() -> None:
    launched_work = LaunchedWork(Settings())
    device = launch(launched_work, 1, "a")
    device.is_reached = False
    launched_work.poll()
    assert launched_work.state(Wait((0, "a"), 1)) == WaitState.NOT_REACHED
    assert launched_work.on_devices() == {Wait((0, "a"), 1): None}
    device.is_reached = True
    launched_work.poll()
    assert launched_work.state(Wait((0, "a"), 1)) == WaitState.NOT_COMPLETE
    assert launched_work.on_devices()[Wait((0, "a"), 1)] is not None


def test_each_process_set_has_its_own_order_of_launches() -> None:
    launched_work = LaunchedWork(Settings())
    launched_work.add(6, [(0, "a")], Launch([], [], 0.0))
    launched_work.add(5, [(1, "b")], Launch([], [], 0.0))
    assert launched_work.state(Wait((0, "a"), 6)) is not None
    assert launched_work.state(Wait((0, "a"), 4)) is None
    assert launched_work.state(Wait((1, "b"), 6)) == WaitState.NOT_LAUNCHED


def test_the_time_of_a_bucket_counts_from_the_end_of_the_one_before_it() -> None:
    launched_work = LaunchedWork(Settings())
    first = launch(launched_work, 1, "a")
    launch(launched_work, 2, "b")
    launched_work.poll()
    (early_s,) = {launched_work.on_devices()[Wait((0, "b"), 2)]}
    time.sleep(0.01)
    first.has_completed = True
    launched_work.poll()
    assert early_s is not None
    assert launched_work.on_devices()[Wait((0, "b"), 2)] > early_s  # type: ignore[operator]


def test_after_a_long_pause_of_this_process_the_time_counts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    launched_work = LaunchedWork(Settings())
    launch(launched_work, 1, "a")
    launched_work.poll()
    clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 60)
    launched_work.poll()
    assert launched_work.on_devices()[Wait((0, "a"), 1)] >= clock() + 59  # type: ignore[operator]


def test_a_bucket_that_is_done_does_not_keep_the_work_and_so_the_tensors_of_a_cpu() -> None:
    work: Any = Device()
    bucket = Launch([work], [], None)
    assert not bucket.is_complete()
    bucket.finish()
    assert bucket.is_complete()
    assert bucket.works == []


@pytest.mark.slow
def test_work_that_one_device_never_completes_is_reported_and_ends_on_every_rank() -> None:
    def fn() -> None:
        import controlled_device

        import hvd_cluster.torch as hvd

        rank = int(os.environ["HOROVOD_RANK"])
        controlled_device.install(lambda number: rank != 1 or number < 1)
        hvd.init()
        hvd.allreduce(torch.ones(1), name="good")
        hvd.allreduce(torch.ones(1), name="gradient")
        time.sleep(10)  # as in a synchronize() of the device
        with pytest.raises(
            hvd.HorovodInternalError, match=r"1: \[allreduce.gradient\] - rank 1 .*has not completed this"
        ):
            hvd.allreduce(torch.ones(1), name="after")

    errors = io.StringIO()
    local.run(fn, num_proc=3, env=ENV, stderr=errors)
    text = errors.getvalue()
    assert text.count("have begun and do not complete") == 1
    assert "1: [allreduce.gradient] - rank 1 on 127.0.0.1 last submitted allreduce.gradient, " in text
    assert "it has not completed this operation; process " in text
    assert "test_launched_work.py:" in text
    assert "in test_work_that_one_device_never_completes_is_reported_and_ends_on_every_rank.<locals>.fn" in text
    assert "the communication itself hangs" not in text


@pytest.mark.slow
def test_work_that_no_device_completes_is_laid_to_the_network() -> None:
    def fn() -> None:
        import controlled_device

        import hvd_cluster.torch as hvd

        controlled_device.install(lambda _: False)
        hvd.init()
        hvd.allreduce(torch.ones(1), name="gradient")
        time.sleep(10)
        with pytest.raises(hvd.HorovodInternalError, match="the communication itself hangs"):
            hvd.allreduce(torch.ones(1), name="after")

    local.run(fn, num_proc=2, env=ENV | {"HOROVOD_STALL_CHECK_DISABLE": "1"}, stderr=io.StringIO())


@pytest.mark.slow
def test_a_device_that_is_busy_with_other_work_is_reported_and_waited_for() -> None:
    def fn() -> list[float]:
        import controlled_device

        import hvd_cluster.torch as hvd

        rank = int(os.environ["HOROVOD_RANK"])
        end_s = time.monotonic() + 7
        controlled_device.install(
            lambda _: time.monotonic() > end_s, has_inputs=lambda: rank == 0 or time.monotonic() > end_s
        )
        hvd.init()
        hvd.allreduce(torch.ones(1), name="gradient")
        time.sleep(7.5)
        total = hvd.allreduce(torch.ones(1), name="after", op=hvd.Sum)
        hvd.shutdown()
        return total.tolist()  # type: ignore[no-any-return]

    errors = io.StringIO()
    assert local.run(fn, num_proc=2, env=ENV, stderr=errors) == [[2.0], [2.0]]
    text = errors.getvalue()
    assert "1: [allreduce.gradient] - rank 1 on 127.0.0.1 " in text
    assert "its device is still busy with earlier work; process " in text
    assert "0: [allreduce.gradient]" not in text


def test_work_that_fails_later_ends_the_job_without_another_operation() -> None:
    def fn() -> float:
        import controlled_device

        import hvd_cluster.torch as hvd

        rank = int(os.environ["HOROVOD_RANK"])
        fails_s = time.monotonic() + 2

        def is_complete(_: int) -> bool:
            if rank == 1 and time.monotonic() > fails_s:
                raise RuntimeError("the link is down")
            return False

        controlled_device.install(is_complete)
        hvd.init()
        hvd.allreduce(torch.ones(1), name="gradient")
        time.sleep(6)
        with pytest.raises(hvd.HorovodInternalError, match="rank 1 .* failed: RuntimeError: the link is down"):
            hvd.allreduce(torch.ones(1), name="after")
        return time.monotonic()

    local.run(fn, num_proc=2, env=ENV | {"HOROVOD_GLOO_TIMEOUT_SECONDS": "30"}, stderr=io.StringIO())


def test_a_shutdown_does_not_wait_for_work_that_is_never_completed() -> None:
    def fn() -> bool:
        import controlled_device

        import hvd_cluster.torch as hvd

        controlled_device.install(lambda _: False)
        hvd.init()
        hvd.allreduce(torch.ones(1), name="gradient")
        hvd.shutdown()
        return hvd.is_initialized()

    assert local.run(fn, num_proc=2, env=ENV, stderr=io.StringIO()) == [False, False]
