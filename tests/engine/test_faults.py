"""What happens on the survivors: death in mid-operation, shutdown with work in flight, forks, re-initialisation."""

from __future__ import annotations

import io
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from hvd_cluster.errors import WorkerFailedError
from hvd_cluster.launch import local

ENV = {"OMP_NUM_THREADS": "1", "HOROVOD_GLOO_TIMEOUT_SECONDS": "60"}


def survive(folder: str, num_elements: int, victim: int) -> None:
    """Allreduce for ever; the victim is killed in the middle; the others note what they were told, and when."""
    import threading

    from footprint import footprint, left_over

    import hvd_cluster.torch as hvd

    tensor = torch.ones(num_elements)
    for _ in range(2):  # what the first world leaves behind, torch keeps for ever
        before = footprint()
        hvd.init()
        hvd.allreduce_(tensor, name="warm")
        hvd.shutdown()
    hvd.init()
    hvd.allreduce_(tensor, name="warm")
    if hvd.rank() == victim:
        killed_s = time.time() + 0.5
        Path(folder, "killed").write_text(str(killed_s))
        threading.Timer(killed_s - time.time(), os.kill, (os.getpid(), signal.SIGKILL)).start()
    try:
        while True:
            hvd.allreduce_(tensor, name="loop")
    except hvd.HorovodInternalError as error:
        told = {"at": time.time(), "text": str(error)}
        with pytest.raises(hvd.HorovodInternalError, match="has been shut down"):
            hvd.allreduce(tensor, name="afterwards")
        hvd.shutdown()
        told["left_after"] = time.time() - told["at"]  # type: ignore[operator]
        told["left_over"] = left_over(before)
        Path(folder, f"told.{hvd.is_initialized()}.{os.getpid()}").write_text(json.dumps(told))
        raise


@pytest.mark.parametrize("transport", ["shm", pytest.param("gloo", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("num_elements", "victim"), [(1, 0), pytest.param(20_000_000, 2, marks=pytest.mark.slow)], ids=["small", "80 MB"]
)
def test_kill_9_in_mid_operation_is_an_error_on_every_survivor_within_10_s(
    tmp_path: Path, num_elements: int, victim: int, transport: str
) -> None:
    env = {**ENV, "HOROVOD_SHARED_MEMORY": str(int(transport == "shm"))}
    with pytest.raises(WorkerFailedError) as caught:
        local.run(survive, (str(tmp_path), num_elements, victim), num_proc=4, env=env)
    assert caught.value.rank == victim
    assert caught.value.exit_code == -signal.SIGKILL
    killed_s = float((tmp_path / "killed").read_text())
    told = [json.loads(path.read_text()) for path in tmp_path.glob("told.False.*")]
    assert len(told) == 3
    for story in told:
        assert story["at"] - killed_s < 10
        assert story["left_after"] < 10
        assert story["left_over"] == {}
        assert f"rank {victim}" in story["text"] or "failed" in story["text"]


@pytest.mark.parametrize("shares", ["1", pytest.param("0", marks=pytest.mark.slow)], ids=["shm", "gloo"])
def test_shutdown_with_an_operation_in_flight_fails_it_on_the_others(shares: str) -> None:
    def fn() -> str:
        from footprint import footprint, left_over

        import hvd_cluster.torch as hvd

        for _ in range(2):
            before = footprint()
            hvd.init()
            hvd.allreduce(torch.ones(1), name="warm")
            hvd.shutdown()
        hvd.init()
        if hvd.rank() == 0:
            hvd.shutdown()
            return "left"
        with pytest.raises(hvd.HorovodInternalError) as caught:
            hvd.allreduce(torch.ones(1), name="never")
        hvd.shutdown()
        assert left_over(before) == {}
        return str(caught.value)

    first, *others = local.run(fn, num_proc=3, env={**ENV, "HOROVOD_SHARED_MEMORY": shares})
    assert first == "left"
    for text in others:
        assert text.startswith("Horovod has been shut down.")
        assert "rank 0" in text


def test_a_rank_whose_shutdown_is_not_answered_names_the_rank_that_is_stopped() -> None:
    def fn() -> None:
        import hvd_cluster.torch as hvd
        from hvd_cluster.engine import engine

        engine.SHUTDOWN_TIMEOUT_S = 1.0
        hvd.init()
        root = hvd.allgather_object(os.getpid())[0]
        if hvd.rank() == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            while "(stopped)" not in Path(f"/proc/{root}/status").read_text():
                time.sleep(0.01)
            hvd.shutdown()
            os.kill(root, signal.SIGCONT)

    errors = io.StringIO()
    local.run(fn, num_proc=2, env={**ENV, "HOROVOD_GLOO_TIMEOUT_SECONDS": "1"}, stderr=errors)
    assert (
        "rank 1: the engine's connections are cut: shutdown() was called, but no answer came from "
        "rank 0 on 127.0.0.1 (it is stopped (SIGSTOP or SIGTSTP))\n"
    ) in errors.getvalue()


def test_an_operation_that_all_had_agreed_on_is_finished_before_the_world_ends() -> None:
    def fn() -> float:
        import hvd_cluster.torch as hvd

        hvd.init()
        handle = hvd.allreduce_async(torch.full((5_000_000,), 1.0), op=hvd.Sum, name="last")
        if hvd.rank() == 1:
            time.sleep(0.3)
            hvd.shutdown()
        return hvd.synchronize(handle).sum().item()

    assert local.run(fn, num_proc=2, env=ENV) == [1e7, 1e7]


def test_a_join_behind_an_abort_of_the_same_rank_fails_with_it() -> None:
    def fn() -> list[str]:
        import hvd_cluster.torch as hvd
        from hvd_cluster.engine import current

        hvd.init()
        hvd.allreduce(torch.ones(1))
        texts = []
        if hvd.rank() == 0:
            current.engine().abort("on purpose")
        for _ in range(2):
            try:
                hvd.join()
            except hvd.HorovodInternalError as error:
                texts.append(str(error))
        return texts

    for texts in local.run(fn, num_proc=2, env=ENV):
        assert len(texts) == 2
        assert all("on purpose" in text for text in texts)


def test_a_process_can_leave_and_join_again_and_again() -> None:
    def fn() -> tuple[list[float], int, int]:
        import threading

        import hvd_cluster.torch as hvd

        sums, counts = [], []
        for turn in range(12):
            hvd.init()
            hvd.init()
            sums.append(hvd.allreduce(torch.tensor([float(turn)]), op=hvd.Sum).item())
            hvd.shutdown()
            hvd.shutdown()
            assert not hvd.is_initialized()
            counts.append((threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))))
        return sums, counts[-1][0] - counts[2][0], counts[-1][1] - counts[2][1]

    for sums, more_threads, more_descriptors in local.run(fn, num_proc=2, env=ENV):
        assert sums == [2.0 * turn for turn in range(12)]
        assert more_threads == 0
        assert more_descriptors <= 0


def test_a_forked_child_is_not_a_rank_and_does_no_harm() -> None:
    def fn() -> tuple[int, float]:
        import hvd_cluster.torch as hvd

        hvd.init()
        child = os.fork()
        if child == 0:
            code = 9
            try:
                assert hvd.rank() in (0, 1)
                assert not hvd.is_initialized()
                with pytest.raises(hvd.HorovodInternalError, match="forked"):
                    hvd.allreduce(torch.ones(1))
                hvd.shutdown()
                for name in [name for name in os.environ if name.startswith("HOROVOD_")]:
                    del os.environ[name]
                hvd.init()  # a world of its own
                assert hvd.is_initialized()
                assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 1.0
                hvd.shutdown()
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status), hvd.allreduce(torch.ones(1), op=hvd.Sum).item()

    assert local.run(fn, num_proc=2, env=ENV) == [(0, 2.0)] * 2


def test_before_init_everything_says_so() -> None:
    import hvd_cluster.torch as hvd

    assert not hvd.is_initialized()
    for question in (hvd.rank, hvd.size, hvd.local_rank, hvd.cross_size, hvd.is_homogeneous, hvd.gloo_enabled):
        with pytest.raises(ValueError, match=r"Horovod has not been initialized; use hvd\.init\(\)\."):
            question()
    with pytest.raises(hvd.HorovodInternalError, match="has not been initialized"):
        hvd.allreduce(torch.ones(1))
    assert hvd.gloo_built()
    assert not hvd.mpi_built()


def test_nccl_is_built_in_where_torch_has_it_also_on_a_machine_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import hvd_cluster.torch as hvd
    from hvd_cluster.engine.transports import select

    monkeypatch.setattr(select, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    monkeypatch.setattr(torch.version, "cuda", None)
    assert hvd.nccl_built() == 0
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert hvd.nccl_built() == 22703


@pytest.mark.slow
def test_a_rank_that_never_comes_is_named_on_every_other_rank() -> None:
    def fn() -> str:
        import hvd_cluster.torch as hvd

        if hvd.rank_from_launcher == 1:  # type: ignore[attr-defined]
            return "stayed away"
        with pytest.raises(ConnectionError) as caught:
            hvd.init()
        return str(caught.value)

    def wrapped() -> str:
        import hvd_cluster.torch as hvd

        hvd.rank_from_launcher = int(os.environ["HOROVOD_RANK"])  # type: ignore[attr-defined]
        return fn()

    first, second, third = local.run(wrapped, num_proc=3, env={**ENV, "HOROVOD_GLOO_TIMEOUT_SECONDS": "1"})
    assert "not all of the 3 ranks called hvd.init() within 1 s. Missing: 1; " in first
    assert second == "stayed away"
    assert third == first


@pytest.mark.slow
def test_the_timeline_holds_a_track_for_each_rank_and_survives_kill_9(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"

    def fn(victim: int) -> None:
        import hvd_cluster.torch as hvd

        hvd.init()
        for _ in range(20):
            hvd.allreduce(torch.ones(10), name="test_allreduce")
            hvd.grouped_allreduce([torch.ones(3), torch.ones(4)], name="pair")
        if victim >= 0:
            time.sleep(1.2)  # the period at which events are written
            if hvd.rank() == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            hvd.barrier()
        hvd.shutdown()

    def check() -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = json.loads(path.read_text())
        assert {event["pid"] for event in events} == {0, 1}
        names = {event["name"] for event in events}
        assert {"NEGOTIATE_ALLREDUCE", "QUEUE", "SHM_ALLREDUCE", "ALLREDUCE"} <= names
        assert all(event["dur"] > 0 for event in events if event["name"] == "SHM_ALLREDUCE")
        tracks = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
        assert {"allreduce.test_allreduce", "allreduce.pair_1of2", "allreduce.pair_2of2"} <= tracks
        return events

    env = {**ENV, "HOROVOD_TIMELINE": str(path), "HOROVOD_TIMELINE_MARK_CYCLES": "1"}
    local.run(fn, (-1,), num_proc=2, env=env)
    events = check()
    assert sum(e["name"] == "ALLREDUCE" for e in events) == 2 * 20 * 3
    assert any(e["name"] == "CYCLE_START" for e in events)
    for victim in (0, 1):
        with pytest.raises(WorkerFailedError):
            local.run(fn, (victim,), num_proc=2, env=env)
        check()


def test_a_timeline_is_started_and_stopped_at_run_time(tmp_path: Path) -> None:
    def fn() -> None:
        import hvd_cluster.torch as hvd

        hvd.init()
        for name in ("one", "two"):
            hvd.allreduce(torch.ones(1), name="outside")
            hvd.barrier()
            hvd.start_timeline(str(tmp_path / f"{name}.json"))
            for _ in range(5):
                time.sleep(0.05)
                hvd.allreduce(torch.ones(1), name=name)
            hvd.stop_timeline()
            hvd.barrier()
            time.sleep(0.2)
        hvd.shutdown()

    local.run(fn, num_proc=2, env={**ENV, "HOROVOD_TIMELINE": "DYNAMIC"})
    for name, other in (("one", "two"), ("two", "one")):
        events = json.loads((tmp_path / f"{name}.json").read_text())
        tracks = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
        assert f"allreduce.{name}" in tracks
        assert f"allreduce.{other}" not in tracks
        assert {event["pid"] for event in events} == {0, 1}


def test_start_timeline_needs_the_setting() -> None:
    import hvd_cluster.torch as hvd

    hvd.init()
    try:
        with pytest.raises(ValueError, match="Set HOROVOD_TIMELINE=DYNAMIC"):
            hvd.start_timeline("never.json")
    finally:
        hvd.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("shares", ["1", "0"], ids=["shm", "gloo"])
def test_a_name_is_in_flight_until_its_operation_is_done(shares: str) -> None:
    """Also while the ranks carry it out: two at once would work on one tensor."""

    def fn() -> list[float]:
        import threading

        import hvd_cluster.torch as hvd
        from hvd_cluster.engine.execution import Execution

        hvd.init()
        is_under_way, may_go_on = threading.Event(), threading.Event()
        complete = Execution._complete

        def held_up(self: Execution, results: Any) -> None:
            is_under_way.set()
            assert may_go_on.wait(30)
            complete(self, results)

        Execution._complete = held_up  # type: ignore[method-assign]
        tensor = torch.ones(2, dtype=torch.int16)
        handle = hvd.allgather_async(tensor, name="large")
        assert is_under_way.wait(30)
        with pytest.raises(ValueError, match="same name as another tensor that is currently being processed"):
            hvd.allgather_async(tensor, name="large")
        may_go_on.set()
        assert hvd.synchronize(handle).tolist() == [1] * 4
        sums = [hvd.allgather(tensor, name="large").sum().item() for _ in range(3)]
        hvd.shutdown()
        return sums

    assert local.run(fn, num_proc=2, env={**ENV, "HOROVOD_SHARED_MEMORY": shares}) == [[4, 4, 4]] * 2


def test_a_rank_that_is_taken_to_have_submitted_what_it_has_not_ends_the_world() -> None:
    """Zeros in its place would be a wrong sum on every rank, and nobody would know."""

    def fn() -> str:
        import hvd_cluster.torch as hvd
        from hvd_cluster.engine import basics

        hvd.init()
        hvd.allreduce(torch.ones(1), name="before")
        if hvd.rank() == 1:
            submissions = basics.engine()._submissions
            submissions.begin = lambda keys: [None] * len(keys)  # type: ignore[method-assign]
        with pytest.raises(hvd.HorovodInternalError) as caught:
            hvd.allreduce(torch.ones(1), name="lost", op=hvd.Sum)
        if hvd.rank() == 1:
            return str(caught.value)
        hvd.shutdown()
        return "told"

    first, second = local.run(fn, num_proc=2, env={**ENV, "HOROVOD_SHARED_MEMORY": "0"})
    assert first == "told"
    assert "all ranks were taken to have submitted allreduce.lost, and this one has not" in second


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_kill_9_while_a_process_set_is_built_is_an_error_on_every_survivor_within_10_s(
    tmp_path: Path, transport: str
) -> None:
    def fn() -> None:
        import hvd_cluster.torch as hvd
        from hvd_cluster.engine.transports.select import TransportTable

        hvd.init(process_sets="dynamic")
        hvd.allreduce(torch.ones(1), name="warm")

        def die(self: Any, process_set_id: int) -> None:
            (tmp_path / "killed").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)

        if hvd.rank() == 2:
            TransportTable.build = die  # type: ignore[method-assign]
        try:
            hvd.add_process_set([1, 2, 3])
            if hvd.rank() == 0:
                hvd.allreduce(torch.ones(1), name="next")
        except hvd.HorovodInternalError as error:
            (tmp_path / f"told.{hvd.rank()}").write_text(json.dumps({"at": time.time(), "text": str(error)}))
            hvd.shutdown()
            raise

    env = {**ENV, "HOROVOD_SHARED_MEMORY": str(int(transport == "shm"))}
    with pytest.raises(WorkerFailedError) as caught:
        local.run(fn, num_proc=4, env=env)
    assert caught.value.rank == 2
    killed_s = float((tmp_path / "killed").read_text())
    for rank in (0, 1, 3):
        told = json.loads((tmp_path / f"told.{rank}").read_text())
        assert told["at"] - killed_s < 10
        assert "rank 2" in told["text"]


@pytest.mark.slow
def test_an_engine_that_fails_while_it_decides_fails_the_waiting_handle_too() -> None:
    def fn(where: str) -> str:
        import hvd_cluster.torch as hvd
        from hvd_cluster.engine import decisions as module
        from hvd_cluster.engine.transports.shm import ShmTransport

        hvd.init()

        def broken(*args: Any, **kwargs: Any) -> Any:
            raise OSError("made to fail")

        if where == "building":
            module.execute_inline = broken  # type: ignore[assignment]
        else:
            ShmTransport.reduce_directly = broken  # type: ignore[method-assign]
        with pytest.raises(hvd.HorovodInternalError, match="made to fail"):
            hvd.allreduce(torch.ones(1), name="x")
        hvd.shutdown()
        return "told"

    for where in ("building", "reducing"):
        assert local.run(fn, (where,), num_proc=2, env=ENV) == ["told", "told"]


def test_unnamed_operations_are_counted_from_zero_in_a_new_world() -> None:
    def fn() -> float:
        import hvd_cluster.torch as hvd

        hvd.init()
        if hvd.rank() == 0:
            hvd.allreduce_async(torch.ones(1))  # nobody else does: the world has to end
        hvd.barrier()  # else the other rank may end it before
        hvd.shutdown()
        hvd.init()
        total: float = hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
        hvd.shutdown()
        return total

    assert local.run(fn, num_proc=2, env=ENV) == [2.0, 2.0]


def test_a_world_of_one_serves_several_threads() -> None:
    from concurrent.futures import ThreadPoolExecutor

    import hvd_cluster.torch as hvd

    def reduce(value: int) -> bool:
        tensors = [torch.full((1000,), float(value)), torch.full((10,), float(value))]
        results = [hvd.grouped_allreduce(tensors, op=hvd.Sum) for _ in range(50)]
        return all((tensor == value).all() for result in results for tensor in result)

    hvd.init()
    try:
        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(reduce, range(8)))
    finally:
        hvd.shutdown()


@pytest.mark.slow
def test_a_timeline_that_cannot_be_written_does_not_end_the_job(tmp_path: Path) -> None:
    def fn() -> float:
        import hvd_cluster.torch as hvd

        hvd.init()
        total: float = hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
        hvd.shutdown()
        return total

    for path in (tmp_path, Path("/dev/full")):
        assert local.run(fn, num_proc=2, env={**ENV, "HOROVOD_TIMELINE": str(path)}, verbose=0) == [2.0, 2.0]
