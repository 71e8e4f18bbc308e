"""Threads that wait advance the engine: several at once, interrupted, from a signal handler, in inference mode."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from hvd_cluster.engine.loop import Loop
from hvd_cluster.engine.progress_lock import ProgressLock
from hvd_cluster.engine.request import Handle, Request
from hvd_cluster.engine.signature import Kind, ReduceOp, Signature
from hvd_cluster.engine.submission_queue import SubmissionQueue
from hvd_cluster.launch import local

ENV = {"OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("shares", ["1", "0"], ids=["shm", "gloo"])
def test_several_threads_wait_at_once_and_each_gets_its_own(shares: str) -> None:
    def fn() -> list[list[float]]:
        from concurrent.futures import ThreadPoolExecutor

        import hvd_cluster.torch as hvd

        hvd.init()

        def work(thread: int) -> list[float]:
            found = []
            for turn in range(300):
                tensor = torch.full((1 + 97 * turn,), float(thread * 1000 + turn))
                result = hvd.allreduce(tensor, name=f"{thread}", op=hvd.Sum)
                assert result.min() == result.max()
                found.append(result[0].item())
            return found

        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(work, range(4)))
        hvd.shutdown()
        return results

    expected = [[2.0 * (thread * 1000 + turn) for turn in range(300)] for thread in range(4)]
    assert local.run(fn, num_proc=2, env={**ENV, "HOROVOD_SHARED_MEMORY": shares}) == [expected] * 2


def test_several_threads_wait_for_one_handle() -> None:
    for turn in range(200):
        handle = Handle()
        found: list[Any] = []
        threads = [threading.Thread(target=lambda h=handle, f=found: f.append(h.wait())) for _ in range(3)]
        for thread in threads:
            thread.start()
        handle.succeed(turn)
        handle.fail(ValueError("too late"))
        assert handle.settled()
        for thread in threads:
            thread.join(10)
        assert found == [turn] * 3
        assert handle.settled()
        assert handle.wait() == turn


@pytest.mark.parametrize("shares", ["1", "0"], ids=["shm", "gloo"])
def test_ctrl_c_while_waiting_leaves_the_world_whole(tmp_path: Path, shares: str) -> None:
    def fn() -> list[float]:
        import hvd_cluster.torch as hvd

        hvd.init()
        tensor = torch.ones(10)
        hvd.allreduce_(tensor, name="warm", op=hvd.Sum)
        if hvd.rank() == 0:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
            handle = hvd.allreduce_async(tensor, name="late", op=hvd.Sum)
            with pytest.raises(KeyboardInterrupt):
                hvd.synchronize(handle)
            (tmp_path / f"interrupted.{shares}").touch()
        else:
            while not (tmp_path / f"interrupted.{shares}").exists():
                time.sleep(0.01)
            handle = hvd.allreduce_async(tensor, name="late", op=hvd.Sum)
        late = hvd.synchronize(handle)
        after = hvd.allreduce(tensor, name="after", op=hvd.Sum)
        hvd.shutdown()
        return [late[0].item(), after[0].item()]

    assert local.run(fn, num_proc=2, env={**ENV, "HOROVOD_SHARED_MEMORY": shares}) == [[4.0, 4.0]] * 2


def test_a_signal_handler_that_waits_gets_an_error(tmp_path: Path) -> None:
    def fn() -> tuple[list[str], float, float]:
        import hvd_cluster.torch as hvd

        hvd.init()
        told: list[str] = []
        before = 0

        def handler(*_: object) -> None:
            for wait in (
                lambda: hvd.allreduce(torch.ones(1), name="from the handler"),
                lambda: hvd.synchronize(before),
            ):
                try:
                    wait()
                except hvd.HorovodInternalError as error:
                    told.append(str(error))
            (tmp_path / "told").touch()

        if hvd.rank() == 0:
            before = hvd.allreduce_async(torch.ones(1), name="before", op=hvd.Sum)
            signal.signal(signal.SIGUSR1, handler)
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        else:
            while not (tmp_path / "told").exists():
                time.sleep(0.01)
            before = hvd.allreduce_async(torch.ones(1), name="before", op=hvd.Sum)
            hvd.allreduce_async(torch.ones(1), name="from the handler")
        result = hvd.allreduce(torch.ones(1), name="x", op=hvd.Sum).item()
        earlier = hvd.synchronize(before).item()  # whoever could not wait for it there can here
        hvd.barrier()
        hvd.shutdown()
        return told, result, earlier

    (told, *zero), (_, *one) = local.run(fn, num_proc=2, env=ENV)
    assert len(told) == 2
    assert all("signal handler" in text for text in told)
    assert zero == one == [2.0, 2.0]


def test_shutdown_in_a_signal_handler_ends_the_world_as_soon_as_the_handler_has_returned() -> None:
    def fn() -> tuple[str, float]:
        import hvd_cluster.torch as hvd

        hvd.init()
        hvd.allreduce(torch.ones(1), name="first")
        if hvd.rank() == 0:
            signal.signal(signal.SIGALRM, lambda *_: hvd.shutdown())
            signal.setitimer(signal.ITIMER_REAL, 0.5)
        else:
            time.sleep(1.5)
        try:
            hvd.allreduce(torch.ones(1), name="only rank 0" if hvd.rank() == 0 else "only rank 1")
        except hvd.HorovodInternalError as error:
            text = str(error)
        hvd.shutdown()
        hvd.init()  # waits until the earlier world has ended
        total = hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
        hvd.shutdown()
        return text, total

    env = {**ENV, "HOROVOD_GLOO_TIMEOUT_SECONDS": "60"}  # with which a wait for itself would exceed the limit of a test
    for text, total in local.run(fn, num_proc=2, env=env):
        assert "shut down" in text
        assert total == 2.0


def test_what_is_made_while_the_waiter_is_in_inference_mode_is_of_use_outside() -> None:
    def fn() -> list[bool]:
        import hvd_cluster.torch as hvd

        hvd.init()
        weight = torch.ones(300, requires_grad=True)
        with torch.inference_mode():
            handle = hvd.allreduce_async(torch.ones(300), name="x", op=hvd.Sum)
            result = hvd.synchronize(handle)
        (weight * result).sum().backward()
        # The engine's own buffers were first used in there.
        again = hvd.allreduce(torch.ones(300), name="y", op=hvd.Sum)
        hvd.shutdown()
        assert weight.grad is not None
        return [result.is_inference(), bool((weight.grad == 2).all()), bool((again == 2).all())]

    assert local.run(fn, num_proc=2, env=ENV) == [[False, True, True]] * 2


def test_autotune_changes_parameters_on_all_ranks_alike_and_ends(tmp_path: Path) -> None:
    def fn() -> list[bool]:
        import hvd_cluster.torch as hvd

        hvd.init()
        tensors = [torch.ones(20_000) for _ in range(8)]
        for _ in range(80):
            handles = [hvd.allreduce_async_(t, name=f"t{i}", op=hvd.Average) for i, t in enumerate(tensors)]
            for handle in handles:
                hvd.synchronize(handle)
        hvd.shutdown()
        return [bool((tensor == 1).all()) for tensor in tensors]

    log = tmp_path / "autotune.csv"
    env = {**ENV, "HOROVOD_AUTOTUNE": "1", "HOROVOD_AUTOTUNE_LOG": str(log)}
    assert local.run(fn, num_proc=2, env=env) == [[True] * 8] * 2
    rows = [line.split(",") for line in log.read_text().splitlines()[1:]]
    assert len({(row[4], row[5]) for row in rows}) > 2  # it has tried several
    assert (rows[-1][4], rows[-1][5]) in {(row[4], row[5]) for row in rows[:-1]}  # and ended with one of them


def test_an_idle_world_costs_no_processor_time() -> None:
    def fn() -> float:
        import hvd_cluster.torch as hvd

        hvd.init()
        hvd.allreduce(torch.ones(10))
        time.sleep(0.1)
        before_s = time.process_time()
        time.sleep(1.0)
        spent_s = time.process_time() - before_s
        hvd.barrier()
        hvd.shutdown()
        return spent_s

    for spent_s in local.run(fn, num_proc=2, env=ENV):
        assert spent_s < 0.05


def _is_ready(descriptor: int, limit_ms: int) -> bool:
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    return bool(waiting.poll(limit_ms))


@pytest.fixture
def submissions() -> Iterator[SubmissionQueue]:
    with closing(SubmissionQueue(0.05)) as submissions:
        yield submissions


def _loop(submissions: SubmissionQueue) -> Any:
    """As much of a Loop as hand_over() uses."""
    return SimpleNamespace(
        _submissions=submissions, _leads_other_hosts=False, wake=submissions.wake, may_sleep=lambda: True
    )


def test_a_progress_thread_that_leaves_passes_on_what_has_waited_long_enough(submissions: SubmissionQueue) -> None:
    signature = Signature(Kind.BARRIER, (), ReduceOp.SUM, -1, 1.0, 1.0)
    submissions.submit(Request("a", 0, signature, [], [], lambda _: None, Handle()), is_waited_for=False)
    assert _is_ready(submissions.cycle_timer.descriptor, 10_000)
    Loop.hand_over(_loop(submissions))
    assert submissions.is_urgent
    assert _is_ready(submissions.wakeup, 0)


def test_a_progress_thread_that_leaves_clears_stale_timers(submissions: SubmissionQueue) -> None:
    submissions.cycle_timer.start()
    submissions.idle_timer.start()
    assert _is_ready(submissions.cycle_timer.descriptor, 10_000)
    assert _is_ready(submissions.idle_timer.descriptor, 10_000)
    Loop.hand_over(_loop(submissions))
    assert not submissions.is_urgent
    assert not _is_ready(submissions.wakeup, 0)
    assert not _is_ready(submissions.cycle_timer.descriptor, 200)
    assert _is_ready(submissions.idle_timer.descriptor, 10_000)  # restarted: no thread holds the lock from here on


def test_a_progress_thread_gives_up_in_time_and_passes_on_what_is_left() -> None:
    class Waiting:
        """Waits for a rank that does not come."""

        num_hand_overs = 0

        def is_done(self) -> bool:
            return False

        def work(self, *, is_waited_for: bool) -> None:
            pass

        def spin(self) -> bool:
            return False

        def may_sleep(self) -> bool:
            return True

        def deadline_s(self) -> float | None:
            return None

        def handle_events(self, events: list[tuple[int, int]]) -> None:
            assert not events

        def hand_over(self) -> None:
            self.num_hand_overs += 1

    engine = Waiting()
    with closing(select.epoll()) as poll:
        lock = ProgressLock(cast("Any", engine), poll)
        for rounds in (1, 2):
            give_up_s = time.monotonic() + 0.1
            lock.progress_until(Handle(), give_up_s)
            assert time.monotonic() >= give_up_s
            assert engine.num_hand_overs == rounds
            assert not lock.is_held_here
        lock.abandon()


def test_an_interrupt_of_a_progress_thread_that_leaves_ends_the_world() -> None:
    class Interrupted:
        """Has nothing to do, and is interrupted while it rests."""

        def __init__(self) -> None:
            self.failed: list[BaseException] = []
            self.num_rings = 0

        def is_done(self) -> bool:
            return False

        def work(self, *, is_waited_for: bool) -> None:
            handle.succeed(None)

        def deadline_s(self) -> float | None:
            return None

        def hand_over(self) -> None:
            raise KeyboardInterrupt

        def fail(self, error: BaseException) -> None:
            self.failed.append(error)

        def wake(self) -> None:
            self.num_rings += 1

    handle, engine = Handle(), Interrupted()
    with closing(select.epoll()) as poll:
        lock = ProgressLock(cast("Any", engine), poll)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                lock.progress_until(handle)
            handle = Handle()
        lock.abandon()
    assert [type(error) for error in engine.failed] == [KeyboardInterrupt] * 2
    assert engine.num_rings == 2


@pytest.mark.slow
@pytest.mark.parametrize(("shares", "num_ranks"), [("1", 3), ("0", 2)], ids=["shm", "gloo"])
def test_an_exception_of_a_signal_handler_reaches_the_waiter_and_leaves_the_world_whole(
    tmp_path: Path, shares: str, num_ranks: int
) -> None:
    def fn() -> list[float]:
        import hvd_cluster.torch as hvd

        class TimeIsUp(RuntimeError):
            pass

        def handler(*_: object) -> None:
            raise TimeIsUp

        hvd.init()
        signal.signal(signal.SIGALRM, handler)
        tensor = torch.ones(10)
        hvd.allreduce_(tensor, name="warm", op=hvd.Sum)
        if hvd.rank() == 0:
            handle = hvd.allreduce_async(tensor, name="late", op=hvd.Sum)
            for wait in (lambda: hvd.synchronize(handle), hvd.barrier):
                signal.setitimer(signal.ITIMER_REAL, 0.5)
                with pytest.raises(TimeIsUp):
                    wait()
            (tmp_path / f"interrupted.{shares}").touch()
        else:
            while not (tmp_path / f"interrupted.{shares}").exists():
                time.sleep(0.01)
            handle = hvd.allreduce_async(tensor, name="late", op=hvd.Sum)
            hvd.barrier()
        late = hvd.synchronize(handle)
        after = hvd.allreduce(tensor, name="after", op=hvd.Sum)
        hvd.shutdown()
        return [late[0].item(), after[0].item()]

    sums = [float(num_ranks**2)] * 2
    assert local.run(fn, num_proc=num_ranks, env={**ENV, "HOROVOD_SHARED_MEMORY": shares}) == [sums] * num_ranks


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_exception_of_a_finish_callback_is_that_of_its_own_handle_alone(num_ranks: int) -> None:
    def fn() -> list[Any]:
        import hvd_cluster.torch as hvd
        from hvd_cluster.engine.submission import submit

        hvd.init()

        def finish(results: list[torch.Tensor]) -> Any:
            if hvd.rank() == 0:
                raise LookupError("mine")
            return results[0][0].item()

        found: list[Any] = []
        for kind in (Kind.ALLREDUCE, Kind.ALLGATHER):
            try:
                handle = submit(kind, [torch.ones(1)], process_set=hvd.global_process_set, name="x", finish=finish)
                found.append(handle.wait())
            except LookupError as error:
                found.append(str(error))
        found.append(hvd.allreduce(torch.ones(1), op=hvd.Sum).item())
        hvd.shutdown()
        return found

    expected = [["mine", "mine", float(num_ranks)], [float(num_ranks), 1.0, float(num_ranks)]][:num_ranks]
    assert local.run(fn, num_proc=num_ranks, env=ENV) == expected


@pytest.mark.slow
@pytest.mark.parametrize("shares", ["1", "0"], ids=["shm", "gloo"])
def test_exceptions_of_a_signal_handler_that_come_at_any_moment_leave_the_world_whole(shares: str) -> None:
    def fn() -> list[int]:
        import random

        import hvd_cluster.torch as hvd

        class TimeIsUp(Exception):
            pass

        is_armed = False

        def handler(*_: object) -> None:
            if is_armed:
                raise TimeIsUp

        hvd.init()
        signal.signal(signal.SIGALRM, handler)
        tensors = [torch.ones(count) for count in (1, 1000, 3_000_000)]
        chance = random.Random(7)
        num_wrong = num_interrupts = 0
        for turn in range(300):
            tensor = tensors[turn % 3 if turn % 30 < 3 else 1]
            tensor.fill_(turn)
            handle = hvd.allreduce_async_(tensor, name=f"{turn}", op=hvd.Sum)
            while True:
                try:
                    is_armed = hvd.rank() == 1
                    signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-5, 3e-3))  # once
                    hvd.synchronize(handle)
                    is_armed = False
                    break
                except TimeIsUp:
                    num_interrupts += 1
            num_wrong += int((tensor != hvd.size() * turn).sum())
        is_restored = signal.getsignal(signal.SIGALRM) is handler
        hvd.barrier()
        hvd.shutdown()
        return [num_wrong, num_interrupts > 20, is_restored]

    found = local.run(fn, num_proc=2, env={**ENV, "HOROVOD_SHARED_MEMORY": shares})
    assert found == [[0, False, True], [0, True, True]]


def test_an_exception_of_a_signal_handler_ends_work_that_waits_for_a_stopped_rank(tmp_path: Path) -> None:
    def fn() -> list[str]:
        import hvd_cluster.engine.interrupts as module
        import hvd_cluster.torch as hvd

        class TimeIsUp(Exception):
            pass

        def handler(*_: object) -> None:
            raise TimeIsUp

        hvd.init()
        module._MAX_DELAY_S = 0.5
        pids = hvd.allgather(torch.tensor([os.getpid()])).tolist()
        found = []
        if hvd.rank() == 0:
            signal.signal(signal.SIGALRM, handler)
            while "T" not in Path(f"/proc/{pids[1]}/stat").read_text().split()[2]:
                time.sleep(0.01)
            handle = hvd.allreduce_async(torch.ones(10), name="x")
            signal.setitimer(signal.ITIMER_REAL, 0.3)
        else:
            handle = hvd.allreduce_async(torch.ones(10), name="x")
            time.sleep(0.3)  # its vote is counted: the other rank begins, and waits in the middle of the operation
            os.kill(os.getpid(), signal.SIGSTOP)
        for _ in range(2 - hvd.rank()):
            try:
                hvd.synchronize(handle)
            except (TimeIsUp, hvd.HorovodInternalError) as error:
                found.append(type(error).__name__)
                os.kill(pids[1], signal.SIGCONT)
        hvd.shutdown()
        return found

    # Rank 1 may still read the other's part: that was there before the end.
    assert local.run(fn, num_proc=2, env=ENV)[0] == ["TimeIsUp", "WorldEndedError"]


@pytest.mark.slow
def test_an_exception_of_a_signal_handler_ends_init_and_shutdown_as_itself_and_init_works_again(tmp_path: Path) -> None:
    def fn() -> tuple[list[str], float]:
        import hvd_cluster.torch as hvd

        def handler(*_: object) -> None:
            raise TimeoutError("mine")  # which the rendezvous raises and catches too

        signal.signal(signal.SIGALRM, handler)
        pid = tmp_path / "pid"
        found = []
        if is_first := os.environ["HOROVOD_RANK"] == "0":
            for step in (hvd.init, hvd.shutdown):
                if step is hvd.shutdown:
                    hvd.init()
                    while not pid.exists() or "T" not in Path(f"/proc/{pid.read_text()}/stat").read_text().split()[2]:
                        time.sleep(0.01)
                signal.setitimer(signal.ITIMER_REAL, 0.5)
                try:
                    step()
                except TimeoutError as error:
                    found.append(str(error))
                (tmp_path / step.__name__).touch()
            os.kill(int(pid.read_text()), signal.SIGCONT)
        else:
            while not (tmp_path / "init").exists():
                time.sleep(0.01)
            hvd.init()
            (tmp_path / "new").write_text(str(os.getpid()))
            (tmp_path / "new").rename(pid)
            os.kill(os.getpid(), signal.SIGSTOP)
            hvd.shutdown()
        assert not hvd.is_initialized()
        hvd.init()
        result = hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
        hvd.shutdown()
        return found if is_first else [], result

    assert local.run(fn, num_proc=2, env=ENV) == [(["mine", "mine"], 2.0), ([], 2.0)]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_engine_has_ended_when_its_thread_dies_of_an_error() -> None:
    class Broken:
        """Fails, and fails again when the failure is handled."""

        def is_done(self) -> bool:
            raise RuntimeError

        def fail(self, error: BaseException) -> None:
            raise RuntimeError from error

    with closing(select.epoll()) as poll:
        lock = ProgressLock(cast("Any", Broken()), poll)
        lock.thread.start()
        assert lock.has_ended.wait(30)
        lock.thread.join()
        lock.abandon()
