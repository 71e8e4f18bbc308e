"""Elastic jobs with each kind of session: real Spark, real deaths; the end is that of an undisturbed run, exactly."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import hvd_cluster.spark
from hvd_cluster.errors import LaunchError, NotEnoughSlotsError, StartTimeoutError, WorkerFailedError

pytestmark = pytest.mark.spark

EPOCHS, NUM_SAMPLES, BATCH = 2, 48, 4


def train(folder: Path, pause_s: float) -> dict[str, Any]:
    """Fit a line with an elastic state; every worker notes its step, rank, world and task in ``<folder>/<pid>``."""
    import torch

    import hvd_cluster.torch as hvd

    hvd.init()
    torch.manual_seed(hvd.rank())  # ranks begin apart: the first sync makes them equal
    x = torch.arange(NUM_SAMPLES, dtype=torch.float32).reshape(-1, 1) / NUM_SAMPLES
    data = torch.utils.data.TensorDataset(torch.cat([x, x * x], 1), 3 * x, torch.arange(NUM_SAMPLES))
    model = torch.nn.Linear(2, 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), named_parameters=model.named_parameters()
    )
    sampler = hvd.elastic.ElasticSampler(data, shuffle=True, seed=3)
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, step=0, seen=[], sizes=[])

    @hvd.elastic.run
    def fit(state: Any) -> None:
        while state.epoch < EPOCHS:
            loader = torch.utils.data.DataLoader(data, batch_size=BATCH, sampler=state.sampler)
            for index, (features, target, which) in enumerate(loader):
                state.optimizer.zero_grad()
                torch.nn.functional.mse_loss(state.model(features), target).backward()
                state.optimizer.step()
                state.seen = state.seen + [(state.epoch, int(sample)) for sample in hvd.allgather(which)]
                state.sizes = [*state.sizes, hvd.size()]
                state.step += 1
                state.sampler.record_batch(index, BATCH)
                note = folder / f"{os.getpid()}.new"
                note.write_text(f"{state.step} {hvd.rank()} {hvd.size()} {os.getppid()}")
                note.rename(folder / f"{os.getpid()}")
                doomed = folder / f"doomed.{hvd.rank()}.{state.step}"
                if doomed.exists():
                    doomed.unlink()
                    time.sleep(600)
                if not (folder / "hurry").exists():
                    time.sleep(pause_s)
                state.commit()
            state.epoch += 1
            state.sampler.set_epoch(state.epoch)
            state.commit()

    fit(state)
    return {
        "rank": hvd.rank(),
        "weights": [parameter.detach().flatten().tolist() for parameter in model.parameters()],
        "seen": state.seen,
        "sizes": state.sizes,
    }


class Watcher:
    """Looks at a running job from a thread of its own, and does it harm."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.failure: BaseException | None = None

    def workers(self) -> dict[int, tuple[int, int, int, int]]:
        """Process id -> (step, rank, size, id of its task), of those that live."""
        found = {}
        for note in self._folder.iterdir():
            if note.name.isdigit() and Path(f"/proc/{note.name}").exists():
                step, rank, size, task = map(int, note.read_text().split())
                found[int(note.name)] = (step, rank, size, task)
        return found

    def wait_for(self, condition: Callable[[dict[int, tuple[int, int, int, int]]], bool]) -> None:
        deadline_s = time.monotonic() + 90
        while not condition(self.workers()):
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"the job stands at {self.workers()}")
            time.sleep(0.02)

    def pid_of(self, rank: int, from_step: int = 3) -> int:
        """The worker of ``rank``, once it has taken that many steps."""
        self.wait_for(lambda workers: any(w[1] == rank and w[0] >= from_step for w in workers.values()))
        return next(pid for pid, w in self.workers().items() if w[1] == rank and w[0] >= from_step)

    def hurry(self) -> None:
        """Let the workers pause no more."""
        (self._folder / "hurry").touch()


def run_disturbed(
    folder: Path, harm: Callable[[Watcher], None], pause_s: float = 0.1, **arguments: Any
) -> list[dict[str, Any]]:
    """The results of a job to which ``harm`` is done meanwhile."""
    watcher = Watcher(folder)

    def watch() -> None:
        try:
            harm(watcher)
        except BaseException as error:  # noqa: BLE001 - raised again in the thread of the test
            watcher.failure = error
        finally:
            watcher.hurry()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        results: list[dict[str, Any]] = hvd_cluster.spark.run_elastic(train, (folder, pause_s), **arguments)
    finally:
        thread.join()
    if watcher.failure is not None:
        raise watcher.failure
    return results


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The end of two workers on this host that nobody disturbs."""
    from hvd_cluster.launch.local import run

    folder = tmp_path_factory.mktemp("undisturbed")
    end: dict[str, Any] = run(train, (folder, 0.0), num_proc=2)[0]
    return end


def is_undisturbed(results: list[dict[str, Any]], undisturbed: dict[str, Any]) -> bool:
    return all(result["weights"] == undisturbed["weights"] for result in results) and (
        results[0]["seen"] == undisturbed["seen"]
    )


def each_sample_once_per_epoch(result: dict[str, Any]) -> bool:
    expected = Counter((epoch, sample) for epoch in range(EPOCHS) for sample in range(NUM_SAMPLES))
    return Counter(map(tuple, result["seen"])) == expected


@pytest.mark.spark("connect", "local", "local-cluster", "standalone")
def test_a_worker_that_is_killed_is_replaced_and_changes_nothing(
    spark: Any, tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    def harm(watcher: Watcher) -> None:
        os.kill(watcher.pid_of(0), signal.SIGKILL)

    results = run_disturbed(tmp_path, harm, num_proc=2)
    assert [result["rank"] for result in results] == [0, 1]
    assert is_undisturbed(results, undisturbed)
    assert set(results[0]["sizes"]) == {2}


@pytest.mark.spark("local-cluster", "local", "connect", "standalone")
def test_a_killed_task_and_a_lost_executor_are_replaced(
    spark: Any, spark_master: str, tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    def harm(watcher: Watcher) -> None:
        pid = watcher.pid_of(1)
        task = psutil.Process(watcher.workers()[pid][3])
        victim = task
        if spark_master == "local-cluster":  # elsewhere the executor is the driver, or the node's only one
            victim = next(one for one in task.parents() if one.name() == "java")
        victim.send_signal(signal.SIGKILL)

    results = run_disturbed(tmp_path, harm, num_proc=2)
    assert [result["rank"] for result in results] == [0, 1]
    assert is_undisturbed(results, undisturbed)


@pytest.mark.slow
def test_the_job_continues_with_fewer_workers_and_grows_when_there_is_room(spark: Any, tmp_path: Path) -> None:
    def harm(watcher: Watcher) -> None:
        watcher.wait_for(lambda workers: sum(size == 2 for _, _, size, _ in workers.values()) == 2)
        os.kill(watcher.pid_of(0), signal.SIGKILL)
        watcher.wait_for(lambda workers: any(size == 1 for _, _, size, _ in workers.values()))
        watcher.wait_for(lambda workers: sum(size == 2 for _, _, size, _ in workers.values()) == 2)

    results = run_disturbed(tmp_path, harm, 1.0, num_proc=1, min_num_proc=1, max_num_proc=2)
    assert each_sample_once_per_epoch(results[0])
    assert {1, 2} <= set(results[0]["sizes"])
    assert len(results) == 2


@pytest.mark.spark("local", "connect", "local-cluster", "standalone")
def test_what_the_users_function_raises_ends_the_job_with_its_traceback(spark: Any) -> None:
    def wrong() -> None:
        import hvd_cluster.torch as hvd

        hvd.init()
        raise ValueError(f"a bad batch on rank {hvd.rank()}")

    with pytest.raises(WorkerFailedError, match="ValueError: a bad batch") as raised:
        hvd_cluster.spark.run_elastic(wrong, num_proc=2)
    assert str(raised.value).startswith("Traceback (most recent call last):")
    assert isinstance(raised.value.__cause__, ValueError)


@pytest.mark.spark("local", "connect")
@pytest.mark.slow
def test_a_function_that_raises_again_and_again_on_one_rank_is_given_up(
    spark: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong_on_rank_1() -> None:
        import torch

        import hvd_cluster.torch as hvd

        hvd.init()

        @hvd.elastic.run
        def fit(state: Any) -> None:
            for _ in range(1000):
                if hvd.rank() == 1 and state.step % 5 == 4:
                    time.sleep(2.0)  # what fails within five seconds is one incident
                    raise ValueError("a bad row")
                hvd.allreduce(torch.ones(1), name="step")
                state.step += 1
                state.commit()

        fit(hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, step=0))

    with pytest.raises(WorkerFailedError, match="ValueError: a bad row"):
        hvd_cluster.spark.run_elastic(wrong_on_rank_1, num_proc=2)
    assert "4 times workers raised an exception; spark.task.maxFailures, now 4" in caplog.text


def test_more_workers_than_the_session_can_have_are_refused_before_anything_starts(
    spark: Any, spark_master: str
) -> None:
    # A standalone master might get more workers, so there the wait has an end of its own.
    expected = StartTimeoutError if spark_master == "standalone" else NotEnoughSlotsError
    with pytest.raises(expected, match=r"8 slots needed, \d free"):
        hvd_cluster.spark.run_elastic(lambda: 1, num_proc=8, start_timeout=5)


@pytest.mark.spark("local")
@pytest.mark.slow
def test_what_spark_refuses_is_told_before_the_wait_is_over(spark: Any) -> None:
    from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests

    profile = ResourceProfileBuilder().require(TaskResourceRequests().cpus(2)).build
    said = "resource_profile needs Spark 4.0" if spark.version < "4" else "Spark says: .*Profiles are only supported"
    began = time.monotonic()
    with pytest.raises(LaunchError, match=said):
        hvd_cluster.spark.run_elastic(lambda: 1, num_proc=1, resource_profile=profile)
    assert time.monotonic() - began < 60


@pytest.mark.spark("local", "connect")
@pytest.mark.slow
def test_reset_limit_bounds_how_often_the_workers_change(spark: Any, tmp_path: Path) -> None:
    def harm(watcher: Watcher) -> None:
        os.kill(watcher.pid_of(1), signal.SIGKILL)

    with pytest.raises(LaunchError, match="number of resets during elastic job exceeded limit: 0"):
        run_disturbed(tmp_path, harm, num_proc=2, reset_limit=0)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"num_proc": 2, "min_num_proc": 3}, "min_num_proc=3 is more than num_proc=2"),
        ({"num_proc": 2, "max_num_proc": 1}, "max_num_proc=1 is less than num_proc=2"),
        ({"min_num_proc": 0}, "min_num_proc=0 must be a whole number of at least 1"),
        ({"num_proc": 0}, "num_proc=0 must be"),
        ({"num_proc": 1, "elastic_timeout": 0, "reset_limit": -1}, "elastic_timeout=0 must be.*; reset_limit=-1 must"),
    ],
)
def test_arguments_that_cannot_be_right_are_all_named(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        hvd_cluster.spark.run_elastic(lambda: 1, **arguments)


@pytest.mark.spark("local")
def test_the_old_names_of_the_bounds_still_work(spark: Any) -> None:
    with pytest.warns(DeprecationWarning, match="max_np is deprecated, use max_num_proc"):
        assert hvd_cluster.spark.run_elastic(lambda: os.environ["HOROVOD_ELASTIC"], num_proc=1, max_np=1) == ["1"]


@pytest.mark.slow
@pytest.mark.spark("local-cluster", "connect")
@pytest.mark.timeout(1200)
def test_twenty_kills_in_a_row_change_nothing(
    spark: Any, spark_master: str, tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    chance = random.Random(7)
    for number in range(20):
        folder = tmp_path / str(number)
        folder.mkdir()
        rank, step = chance.randrange(2), chance.randrange(1, 10)
        kind = chance.choice(["worker", "task", "executor" if spark_master == "local-cluster" else "task"])
        # It waits there for its death: otherwise a job may be at its end when a slow machine has killed an executor.
        (folder / f"doomed.{rank}.{step}").touch()

        def harm(watcher: Watcher, rank: int = rank, step: int = step, kind: str = kind) -> None:
            pid = watcher.pid_of(rank, step)
            if kind == "worker":
                os.kill(pid, signal.SIGKILL)
                return
            task = psutil.Process(watcher.workers()[pid][3])
            executor = next((one for one in task.parents() if one.name() == "java"), task)
            (executor if kind == "executor" else task).send_signal(signal.SIGKILL)

        results = run_disturbed(folder, harm, num_proc=2)
        assert is_undisturbed(results, undisturbed), (number, kind, rank, step)


@pytest.mark.spark("local")
def test_tasks_that_cannot_reach_the_driver_say_where_they_tried(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from hvd_cluster.spark.classic import ClassicSession

    monkeypatch.setattr(ClassicSession, "driver_hosts", lambda _: ("127.0.0.1", ["127.0.0.9"]))
    with pytest.raises(LaunchError, match=r"the task on \S+ cannot reach the driver at 127\.0\.0\.9:\d+\. The process"):
        hvd_cluster.spark.run_elastic(lambda: 1, num_proc=1)
