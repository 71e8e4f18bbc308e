"""What goes wrong on a Ray cluster; after each of it no actor and no placement group is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from ray_clusters import TestCluster, await_nothing_left, left_on_ray

from hvd_cluster.errors import LaunchError, StartTimeoutError, WorkerFailedError
from hvd_cluster.launch.outcome import collect
from hvd_cluster.launch.worker_group import Callbacks
from hvd_cluster.ray import RayExecutor, actor_group
from hvd_cluster.ray.actor import ActorWorker
from hvd_cluster.ray.adapter import packed
from hvd_cluster.ray.session import Connection
from hvd_cluster.ray.worker import BaseHorovodWorker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

#: Seconds within which a death must have become an error, on a busy machine.
NOTICE_S = 40.0


def executor_of(num_workers: int, **arguments: Any) -> RayExecutor:
    return RayExecutor(RayExecutor.create_settings(timeout_s=100), num_workers=num_workers, **arguments)


def train(folder: str, seconds: float = 100.0) -> int:
    """Reduce again and again; leaves a file with the process's id at the third step."""
    import torch

    import hvd_cluster.torch as hvd

    hvd.init()
    deadline_s = time.monotonic() + seconds
    step = 0
    while time.monotonic() < deadline_s:
        hvd.allreduce(torch.ones(4), name="step")
        step += 1
        if step == 3:
            Path(folder, str(hvd.rank())).write_text(str(os.getpid()))
        time.sleep(0.05)
    return step


def in_thread(executor: RayExecutor, *args: Any) -> tuple[threading.Thread, list[Exception]]:
    errors: list[Exception] = []

    def work() -> None:
        try:
            executor.run(train, args=args)
        except Exception as error:  # noqa: BLE001 - the test looks at whatever it is
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    return thread, errors


def await_files(folder: Path, count: int, timeout_s: float = 60.0) -> list[int]:
    deadline_s = time.monotonic() + timeout_s
    while len(files := [file for file in folder.iterdir() if file.name.isdigit() and file.read_text()]) < count:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    return [int(file.read_text()) for file in sorted(files)]


def test_an_actor_that_is_killed_fails_the_call_and_the_executor_starts_again(
    ray_cluster: TestCluster, tmp_path: Path
) -> None:
    executor = executor_of(2)
    executor.start()
    thread, errors = in_thread(executor, str(tmp_path))
    pids = await_files(tmp_path, 2)
    os.kill(pids[1], signal.SIGKILL)
    thread.join(NOTICE_S)
    assert isinstance(errors[0], WorkerFailedError)
    assert "Rank 1 on host" in str(errors[0])
    assert "was killed" in str(errors[0])
    assert errors[0].rank == 1
    with pytest.raises(LaunchError, match=r"Call start\(\) first"):
        executor.run(os.getpid)
    assert await_nothing_left() == []
    executor.start()
    assert len(executor.run(os.getpid)) == 2
    executor.shutdown()


def test_a_worker_that_exits_is_told_with_its_code(ray_cluster: TestCluster) -> None:
    with executor_of(2) as executor, pytest.raises(WorkerFailedError, match="exited with code 3") as raised:
        executor.run(lambda: sys.exit(3) if os.environ["RANK"] == "1" else None)
    assert (raised.value.rank, raised.value.exit_code) == (1, 3)


def test_one_that_raises_while_others_wait_for_it_is_the_cause(ray_cluster: TestCluster) -> None:
    def uneven() -> None:
        import torch

        import hvd_cluster.torch as hvd

        hvd.init()
        if hvd.rank() == 1:
            raise ValueError("only here")
        hvd.allreduce(torch.ones(1))

    executor = executor_of(2)
    executor.start()
    with pytest.raises(WorkerFailedError, match="ValueError: only here") as raised:
        executor.run(uneven)
    assert raised.value.rank == 1

    executor.start()
    executor.run_remote(uneven)
    with pytest.raises(WorkerFailedError, match=r"(?s)ValueError: only here.*in an earlier run_remote\(\)") as raised:
        executor.run(os.getpid)
    assert raised.value.rank == 1
    assert isinstance(raised.value.__cause__, ValueError)
    with pytest.raises(LaunchError, match=r"in an earlier call. Call start\(\) first"):
        executor.run(os.getpid)
    assert await_nothing_left() == []


def test_a_node_that_dies_in_mid_training_fails_the_call(ray_cluster: TestCluster, tmp_path: Path) -> None:
    third = ray_cluster.add_node(resources={"third": 1})
    executor = RayExecutor(RayExecutor.create_settings(timeout_s=100), num_hosts=3)
    executor.start()
    thread, errors = in_thread(executor, str(tmp_path))
    await_files(tmp_path, 3)
    ray_cluster.kill_node(third)
    thread.join(NOTICE_S)
    assert isinstance(errors[0], WorkerFailedError)
    assert await_nothing_left() == []
    ray_cluster.await_dead(third)


def test_a_result_that_goes_with_its_node_before_it_is_fetched_is_a_loss_and_no_exception_of_the_users(
    ray_cluster: TestCluster,
) -> None:
    import ray

    third = ray_cluster.add_node(resources={"third": 1})
    actor = ray.remote(BaseHorovodWorker).options(resources={"third": 1}).remote()
    ref = actor.call.remote(packed(lambda: bytes(2_000_000)))
    assert ray.wait([ref], timeout=60, fetch_local=False)[0]
    ray_cluster.kill_node(third)
    ray_cluster.await_dead(third)
    worker = ActorWorker(
        Connection.current(),
        actor,
        actor.handshake.remote(b""),
        0,
        lambda handshake: None,
        Callbacks(),
    )
    worker.wait()
    outcome = worker._result(ref)
    assert outcome.ending() == "had finished, but its result was lost with its node"
    with pytest.raises(WorkerFailedError) as raised:
        collect([outcome])
    assert raised.value.died


def test_a_placement_group_that_is_pending_is_removed(ray_cluster: TestCluster) -> None:
    first = executor_of(4)
    first.start()
    second = RayExecutor(RayExecutor.create_settings(placement_group_timeout_s=2), num_workers=2)
    with pytest.raises(StartTimeoutError, match="needs 2 CPUs; the cluster has 4, 0 free"):
        second.start()
    assert first.run(lambda: os.environ["SIZE"] if "SIZE" in os.environ else os.environ["WORLD_SIZE"]) == ["4"] * 4
    first.shutdown()


def test_two_executors_at_once_are_two_worlds(ray_cluster: TestCluster) -> None:
    def total(base: float) -> tuple[float, int]:
        import torch

        import hvd_cluster.torch as hvd

        hvd.init()
        return hvd.allreduce(torch.tensor(base), op=hvd.Sum).item(), hvd.size()

    found: dict[float, Any] = {}
    with executor_of(2) as one, executor_of(2) as two:
        threads = [
            threading.Thread(target=lambda e=e, b=b: found.update({b: e.run(total, args=[b])}))
            for e, b in ((one, 1.0), (two, 10.0))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == {1.0: [(2.0, 2)] * 2, 10.0: [(20.0, 2)] * 2}


def spoil_what_the_worker_stands_on() -> str:
    """Spoil the stream that is flushed behind the call, and the environment that says which rank this is."""
    sys.stdout = type("Tee", (), {"write": lambda self, text: None})()  # type: ignore[assignment]
    os.environ["HOROVOD_SIZE"] = "spoiled"
    return "done"


@pytest.mark.parametrize("arguments", [{"num_workers": 2}, {"min_workers": 2, "max_workers": 2}])
def test_a_function_that_spoils_its_worker_still_comes_back(
    ray_cluster: TestCluster, arguments: dict[str, int]
) -> None:
    with RayExecutor(RayExecutor.create_settings(timeout_s=100), **arguments) as executor:
        for _ in range(2):
            assert executor.run(spoil_what_the_worker_stands_on) == ["done"] * 2


def test_a_call_whose_end_the_worker_cannot_report_ends_with_ray_s_word(ray_cluster: TestCluster) -> None:
    def lose_the_thread_of_output() -> None:
        import gc

        from hvd_cluster.ray.driver_connection import DriverConnection

        next(each for each in gc.get_objects() if isinstance(each, DriverConnection)).__dict__.clear()

    with executor_of(1) as executor, pytest.raises(WorkerFailedError, match="AttributeError"):
        executor.run(lose_the_thread_of_output)


def cut_the_line(pause_s: float) -> int:
    """Close this worker's connection to the driver, go on for a while, and print."""
    import gc

    from hvd_cluster.ray.driver_connection import DriverConnection

    line = next(each for each in gc.get_objects() if isinstance(each, DriverConnection))
    deadline = time.monotonic() + 30
    while line._channel is None and time.monotonic() < deadline:
        time.sleep(0.01)  # cut by the call before: the driver had its result first, and calls again
    assert line._channel is not None
    line._channel.close()
    time.sleep(pause_s)
    print("after the cut", flush=True)
    return os.getpid()


def test_a_connection_that_breaks_costs_output_and_not_the_worker(
    ray_cluster: TestCluster, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with executor_of(2) as executor:
        pids = executor.run(os.getpid)
        for pause_s in (0.0, 5.0):  # the call is over before Ray is asked, or later
            assert executor.run(cut_the_line, args=[pause_s]) == pids
        assert executor.run(os.getpid) == pids
    assert "broke and is restored" in caplog.text
    assert "[1]<stdout>:after the cut" in capfd.readouterr().out
    with RayExecutor(RayExecutor.create_settings(timeout_s=100), min_workers=1, max_workers=1) as executor:
        assert len(executor.run(cut_the_line, args=[5.0])) == 1


def test_a_worker_that_dies_between_two_calls_has_not_answered_the_second(
    ray_cluster: TestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = executor_of(2)
    executor.start()
    pids = executor.run(os.getpid)
    share = actor_group.shared

    def slow(order: Any) -> Any:
        """As it is with large arguments: the death becomes known meanwhile."""
        os.kill(pids[1], signal.SIGKILL)
        time.sleep(5)
        return share(order)

    monkeypatch.setattr(actor_group, "shared", slow)
    with pytest.raises(WorkerFailedError, match="was killed") as raised:
        executor.run(os.getpid)
    assert raised.value.rank == 1


PAUSED = """\
import sys, time
import ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="error")
from hvd_cluster.ray import RayExecutor
def work(folder):
    import os
    open(os.path.join(folder, str(os.environ["RANK"])), "w").write(str(os.getpid()))
    for number in range(200):
        print("x" * 100_000, flush=True)
        time.sleep(0.1)
    return "done"
with RayExecutor(RayExecutor.create_settings(timeout_s=100), ARGUMENTS) as executor:
    found = executor.run(work, args=[sys.argv[2]])
sys.stderr.write(f"results {found}")
"""


@pytest.mark.parametrize("arguments", ["num_workers=2", "min_workers=2, max_workers=2"])
def test_a_driver_that_is_paused_while_its_workers_write_loses_nothing(
    ray_cluster: TestCluster, tmp_path: Path, arguments: str
) -> None:
    script = tmp_path / "driver.py"
    script.write_text(PAUSED.replace("ARGUMENTS", arguments))
    driver = subprocess.Popen(
        [sys.executable, script, ray_cluster.address, str(tmp_path)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        await_files(tmp_path, 2)
        driver.send_signal(signal.SIGSTOP)
        time.sleep(20)  # twice as long as a machine may be silent before it counts as gone
        driver.send_signal(signal.SIGCONT)
        _, errors = driver.communicate(timeout=120)
    finally:
        driver.kill()
        driver.wait()
    assert "results ['done', 'done']" in errors
    assert driver.returncode == 0


def test_results_that_overflow_the_object_store_still_arrive(ray_cluster: TestCluster) -> None:
    size = 150 * 2**20  # the store of a node has 100 MB
    with executor_of(1) as executor:
        found = executor.run(lambda: b"x" * size)
    assert [len(result) for result in found] == [size]


DRIVER = """\
import sys, time
import ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="error")
from hvd_cluster.ray import RayExecutor
executor = RayExecutor(RayExecutor.create_settings(timeout_s=100), ARGUMENTS)
executor.start()
def work():
    import os
    import hvd_cluster.torch as hvd
    hvd.init()
    open(FOLDER + "/" + str(hvd.rank()), "w").write(str(os.getpid()))
    time.sleep(100)
executor.run(work)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
@pytest.mark.parametrize(("arguments", "num_on_ray"), [("num_workers=2", 3), ("min_workers=2, max_workers=2", 2)])
def test_a_driver_that_dies_or_is_interrupted_leaves_nothing(
    ray_cluster: TestCluster, tmp_path: Path, number: signal.Signals, arguments: str, num_on_ray: int
) -> None:
    script = tmp_path / "driver.py"
    script.write_text(DRIVER.replace("FOLDER", repr(str(tmp_path))).replace("ARGUMENTS", arguments))
    driver = subprocess.Popen([sys.executable, script, ray_cluster.address], stderr=subprocess.PIPE, text=True)
    try:
        pids = await_files(tmp_path, 2)
        assert len(left_on_ray()) == num_on_ray
        driver.send_signal(number)
        _, errors = driver.communicate(timeout=NOTICE_S)
    finally:
        driver.kill()
        driver.wait()
    assert await_nothing_left() == []
    deadline_s = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    assert driver.returncode != 0
    assert number != signal.SIGINT or "KeyboardInterrupt" in errors
