"""Stops, exceptions and forks between and within operations, on each transport of one host."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from hvd_cluster.errors import WorkerFailedError
from hvd_cluster.launch import local

ENV = {"OMP_NUM_THREADS": "1"}
TRANSPORTS = pytest.mark.parametrize("shares", ["1", "0"], ids=["shm", "gloo"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("shm", "rank 1 of this host did not come to a collective within 5 s"),
        ("ballot", "rank 1 of this host did not finish its vote within 5 s"),
        ("gloo", "rank 1 on 127.0.0.1 does not answer: it is stopped (SIGSTOP or SIGTSTP)"),
    ],
)
def test_a_rank_that_is_stopped_for_longer_than_the_limits_ends_the_job(tmp_path: Path, where: str, words: str) -> None:
    def fn(where: str) -> None:
        import hvd_cluster.torch as hvd
        from hvd_cluster.engine.shared_memory.ballot import Ballot
        from hvd_cluster.engine.transports.gloo import GlooTransport
        from hvd_cluster.engine.transports.shm import ShmTransport

        hvd.init()
        tensor = torch.ones(200_000)
        hvd.allreduce_(tensor, name="warm")
        if hvd.rank() == 1:
            # In the middle of a collective, or of a vote. With Gloo the stall inspector notices it first.
            places = {
                "shm": (ShmTransport, "_synchronize"),
                "ballot": (Ballot, "_has_room"),
                "gloo": (GlooTransport, "allreduce"),
            }
            setattr(*places[where], lambda *_: os.kill(os.getpid(), signal.SIGSTOP))
        try:
            while True:
                hvd.allreduce_(tensor, name="loop")
        except hvd.HorovodInternalError as error:
            path = tmp_path / f"told.{hvd.rank()}"
            path.write_text(json.dumps({"text": str(error), "at": time.time()}))
            raise

    start_s = time.time()
    env = {
        **ENV,
        "HOROVOD_SHARED_MEMORY": "0" if where == "gloo" else "1",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "1",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "3",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "5",
    }
    with pytest.raises(WorkerFailedError):
        local.run(fn, (where,), num_proc=3, env=env)
    told = {path.name: json.loads(path.read_text()) for path in tmp_path.glob("told.*")}
    assert {"told.0", "told.2"} <= set(told)
    for name in ("told.0", "told.2"):
        assert told[name]["at"] - start_s < 30
        assert words in told[name]["text"]


@pytest.mark.slow
def test_a_job_whose_processes_are_all_stopped_for_a_while_continues_afterwards(tmp_path: Path) -> None:
    """As by `scontrol suspend`, for longer than a rank waits for the others."""
    is_over = threading.Event()

    def fn() -> float:
        import hvd_cluster.torch as hvd
        from hvd_cluster.engine.transports.shm import ShmTransport

        hvd.init()
        meet = ShmTransport._synchronize
        if hvd.rank() == 1:  # so that rank 0 waits nearly always

            def late(self: ShmTransport) -> None:
                time.sleep(1)
                meet(self)

            ShmTransport._synchronize = late  # type: ignore[method-assign]
        tensor = torch.ones(200_000)
        (tmp_path / f"{os.getpid()}").touch()
        ended = torch.zeros(1)
        while not ended:
            hvd.allreduce_(tensor, name="loop")
            ended = hvd.allreduce(torch.tensor([float((tmp_path / "resumed").exists())]), op=hvd.Max, name="ended")
        hvd.shutdown()
        return tensor[-1].item()

    def suspend_and_resume() -> None:
        pids: list[int] = []
        while len(pids) < 2 and not is_over.wait(0.05):
            pids = [int(path.name) for path in tmp_path.iterdir()]
        for turn in range(3):
            if is_over.wait(1.3 + 0.137 * turn):
                return
            for number in (signal.SIGSTOP, signal.SIGCONT):
                for pid in pids:
                    with suppress(ProcessLookupError):
                        os.kill(pid, number)
                if number == signal.SIGSTOP:
                    time.sleep(7)
        (tmp_path / "resumed").touch()

    suspending = threading.Thread(target=suspend_and_resume)
    suspending.start()
    try:
        assert local.run(fn, num_proc=2, env={**ENV, "HOROVOD_GLOO_TIMEOUT_SECONDS": "6"}) == [1.0, 1.0]
    finally:
        is_over.set()
        suspending.join()


@TRANSPORTS
def test_an_exception_between_two_asynchronous_operations_leaves_the_others_an_error(shares: str) -> None:
    def fn() -> str:
        import hvd_cluster.torch as hvd

        hvd.init()
        first = hvd.allreduce_async(torch.ones(1000), name="first", op=hvd.Sum)
        if hvd.rank() == 1:
            hvd.synchronize(first)
            raise ValueError("the user's own")
        second = hvd.allreduce_async(torch.ones(1000), name="second", op=hvd.Sum)
        assert hvd.synchronize(first)[0].item() == 2.0
        with pytest.raises(hvd.HorovodInternalError):
            hvd.synchronize(second)
        hvd.shutdown()
        return "told"

    with pytest.raises(WorkerFailedError, match="the user's own") as caught:
        local.run(fn, num_proc=2, env={**ENV, "HOROVOD_SHARED_MEMORY": shares})
    assert caught.value.rank == 1


@pytest.mark.slow
@TRANSPORTS
def test_a_fork_with_operations_in_flight_changes_nothing_for_the_parent(shares: str) -> None:
    def fn() -> list[float]:
        import warnings

        import hvd_cluster.torch as hvd

        hvd.init()
        sums = []
        for turn in range(10):
            handles = [hvd.allreduce_async(torch.full((5000,), float(turn)), name=f"{i}", op=hvd.Sum) for i in range(5)]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of forks with threads
                pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    hvd.allreduce(torch.ones(1))
                except hvd.HorovodInternalError:
                    code = 0  # it is no rank, and says so
                finally:
                    os._exit(code)
            sums += [hvd.synchronize(handle)[-1].item() for handle in handles]
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        hvd.shutdown()
        return sums

    expected = [2.0 * turn for turn in range(10) for _ in range(5)]
    assert local.run(fn, num_proc=2, env={**ENV, "HOROVOD_SHARED_MEMORY": shares}) == [expected] * 2


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("length", [1, 50_000, 2_000_000])
def test_kill_9_at_any_moment_is_an_error_on_every_survivor(tmp_path: Path, length: int) -> None:
    """Twenty times: the victim may hold the lock of the ballot, or be anywhere in a collective."""

    def fn(folder: str, delay_s: float) -> None:
        import hvd_cluster.torch as hvd

        hvd.init()
        tensor = torch.ones(length)
        hvd.allreduce_(tensor, name="loop")
        if hvd.rank() == 1:
            threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
        try:
            while True:
                hvd.allreduce_(tensor, name="loop")
        except hvd.HorovodInternalError:
            hvd.shutdown()
            Path(folder, f"{hvd.is_initialized()}.{os.getpid()}").touch()
            raise

    for turn in range(20):
        folder = tmp_path / f"{length}.{turn}"
        folder.mkdir()
        with pytest.raises(WorkerFailedError) as caught:
            local.run(fn, (str(folder), 0.05 + 0.0137 * turn), num_proc=3, env=ENV)
        assert caught.value.rank == 1
        assert len(list(folder.glob("False.*"))) == 2


@pytest.mark.slow
def test_what_was_decided_before_an_abort_is_waited_for_no_more(tmp_path: Path) -> None:
    """Rank 2 has voted. Before it reads that all have, rank 1 dies, and rank 0 tells of it and says farewell."""

    def fn() -> None:
        import select

        import hvd_cluster.torch as hvd
        from hvd_cluster.engine.loop import Loop

        def wait_for(name: str) -> None:
            while not (tmp_path / name).exists():
                time.sleep(0.01)

        hvd.init()
        rank, tensor = hvd.rank(), torch.ones(1)
        for _ in range(3):
            hvd.allreduce_(tensor, name="loop")
        work, has_voted = Loop.work, False

        def late(self: Loop, *, is_waited_for: bool) -> None:
            nonlocal has_voted
            if has_voted:
                wait_for("told.0")
                Loop.work = work  # type: ignore[method-assign]
                self.handle_events([(descriptor, select.EPOLLIN) for descriptor in self._links._ranks])
            has_voted = has_voted or self._submissions.has_submitted
            work(self, is_waited_for=is_waited_for)
            if has_voted:
                (tmp_path / "voted").touch()

        if rank == 0:
            wait_for("voted")
        elif rank == 1:
            hvd.allreduce_async_(tensor, name="loop")
            wait_for("voted")
            time.sleep(2)  # in which the engine votes here, and rank 0 does as the last
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            Loop.work = late  # type: ignore[method-assign]
        try:
            hvd.allreduce_(tensor, name="loop")
        except hvd.HorovodInternalError:
            hvd.shutdown()
            (tmp_path / f"told.{rank}").touch()
            raise

    with pytest.raises(WorkerFailedError) as caught:
        local.run(fn, num_proc=3, env=ENV)
    assert caught.value.rank == 1
    assert sorted(path.name for path in tmp_path.glob("told.*")) == ["told.0", "told.2"]
