"""Elastic jobs on Ray: nodes that die are left, nodes that join are used, and the weights are what they would be."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from ray_clusters import TestCluster, await_nothing_left

from hvd_cluster.errors import LaunchError, StartTimeoutError, WorkerFailedError
from hvd_cluster.ray import ElasticRayExecutor, RayExecutor
from hvd_cluster.ray.elastic import RayHostDiscovery, TestDiscovery

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STEPS = 60


def train(folder: str, steps: int = STEPS, pause_s: float = 0.1) -> dict[str, Any]:
    """Sum the number of the step over the ranks, and remember the size of the world at each step."""
    import torch

    import hvd_cluster.torch as hvd
    from hvd_cluster.ray import ray_logger

    hvd.init()
    state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, step=0, mean=0.0, sizes=[])

    @hvd.elastic.run
    def loop(state: Any) -> dict[str, Any]:
        while state.step < steps:
            state.mean += hvd.allreduce(torch.tensor(float(state.step)), name="step").item()
            state.sizes = [*state.sizes, hvd.size()]
            state.step += 1
            Path(folder, f"pid.{os.getpid()}").write_text(f"{state.step} {hvd.rank()} {hvd.size()}")
            if hvd.rank() == 0:
                ray_logger.log({"step": state.step, "size": hvd.size()})
            if not Path(folder, "hurry").exists():
                time.sleep(pause_s)
            state.commit()
        return {"mean": state.mean, "sizes": state.sizes, "rank": hvd.rank()}

    return loop(state)


class Job:
    """An elastic job that runs in a thread, so that the test can disturb it."""

    def __init__(self, run: Any, folder: Path) -> None:
        self.folder = folder
        self.logged: list[dict[str, Any]] = []
        self.results: list[Any] = []
        self.errors: list[Exception] = []

        def work() -> None:
            try:
                self.results = run([self.logged.append])
            except Exception as error:  # noqa: BLE001 - raised again by end()
                self.errors.append(error)

        self.thread = threading.Thread(target=work)
        self.thread.start()

    def workers(self) -> dict[int, tuple[int, int, int]]:
        """Process id -> (step, rank, size) of those that live."""
        found = {}
        for file in self.folder.glob("pid.*"):
            pid = int(file.name.removeprefix("pid."))
            text = file.read_text().split()
            if Path(f"/proc/{pid}").exists() and len(text) == 3:
                found[pid] = (int(text[0]), int(text[1]), int(text[2]))
        return found

    def wait_for(self, condition: Any, timeout_s: float = 120.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not condition(self.workers()):
            assert self.thread.is_alive(), self.errors
            assert time.monotonic() < deadline_s, self.workers()
            time.sleep(0.05)

    def wait_for_size(self, expected: int, *, after: int) -> int:
        """Wait for a step later than ``after`` in a world of that size; returns its number.

        A worker that has left, or has not made its first step in the new world yet, still tells the old size. It
        cannot pass for one of the world after: a step takes what every rank gave to it, so no worker of an old world is
        ahead of the first step of the next.
        """
        steps: list[int] = []

        def is_there(workers: dict[int, tuple[int, int, int]]) -> bool:
            steps[:] = [step for step, _, size in workers.values() if size == expected and step > after]
            return bool(steps)

        self.wait_for(is_there)
        return max(steps)

    def end(self, timeout_s: float = 150.0) -> list[Any]:
        (self.folder / "hurry").touch()
        self.thread.join(timeout_s)
        assert not self.thread.is_alive()
        if self.errors:
            raise self.errors[0]
        return self.results


def executor_of(**arguments: Any) -> RayExecutor:
    executor = RayExecutor(RayExecutor.create_settings(timeout_s=100), elastic_timeout=120, **arguments)
    executor.start()
    return executor


def changes(sizes: list[int]) -> list[int]:
    return [size for size, before in zip(sizes, [0, *sizes], strict=False) if size != before]


def test_a_node_that_dies_is_left_and_one_that_joins_is_used(ray_cluster: TestCluster, tmp_path: Path) -> None:
    third = ray_cluster.add_node(num_cpus=2, resources={"third": 1})
    executor = executor_of(min_workers=1, max_workers=3, cpus_per_worker=2)
    job = Job(lambda callbacks: executor.run(train, args=[str(tmp_path), 400], callbacks=callbacks), tmp_path)
    job.wait_for(lambda workers: sum(size == 3 for _, _, size in workers.values()) == 3)
    ray_cluster.kill_node(third)
    # Ray holds the dead node for alive for some 14 s: no worker may be lost to it, nor the job.
    job.wait_for(lambda workers: any(size == 2 for _, _, size in workers.values()))
    fourth = ray_cluster.add_node(num_cpus=2)
    job.wait_for(lambda workers: sum(size == 3 for _, _, size in workers.values()) == 3)
    results = job.end()
    assert changes(results[0]["sizes"]) == [3, 2, 3]
    assert [result["mean"] for result in results] == [sum(range(400))] * 3
    assert [result["rank"] for result in results] == [0, 1, 2]
    assert {entry["size"] for entry in job.logged} == {2, 3}
    assert await_nothing_left() == []
    ray_cluster.await_dead(third)
    ray_cluster.kill_node(fourth)
    ray_cluster.await_dead(fourth)


def test_a_node_that_has_died_but_looks_alive_costs_nothing(ray_cluster: TestCluster, tmp_path: Path) -> None:
    third = ray_cluster.add_node(num_cpus=2, resources={"third": 1})
    # The node could be used again after a second, while Ray still holds it for alive; the one reset is for its loss.
    executor = executor_of(min_workers=1, max_workers=3, cpus_per_worker=2, cooldown_range=(1, 1), reset_limit=1)
    job = Job(lambda callbacks: executor.run(train, args=[str(tmp_path), 2000], callbacks=callbacks), tmp_path)
    job.wait_for(lambda workers: sum(size == 3 for _, _, size in workers.values()) == 3)
    ray_cluster.kill_node(third)
    job.wait_for(lambda workers: any(size == 2 for _, _, size in workers.values()))
    ray_cluster.await_dead(third)
    results = job.end()
    assert changes(results[0]["sizes"]) == [3, 2]
    assert [result["mean"] for result in results] == [sum(range(2000))] * 2


def test_a_worker_that_is_killed_is_replaced(ray_cluster: TestCluster, tmp_path: Path) -> None:
    executor = executor_of(min_workers=2, max_workers=2, cooldown_range=(1, 2))
    job = Job(lambda callbacks: executor.run(train, args=[str(tmp_path), 200], callbacks=callbacks), tmp_path)
    job.wait_for(lambda workers: sum(step >= 3 for step, _, _ in workers.values()) == 2)
    victim = next(pid for pid, (_, rank, _) in job.workers().items() if rank == 1)
    os.kill(victim, signal.SIGKILL)
    job.wait_for(lambda workers: len(workers) == 2 and victim not in workers)
    results = job.end()
    assert [result["mean"] for result in results] == [sum(range(200))] * 2
    assert set(results[0]["sizes"]) == {2}


def test_an_elastic_executor_with_a_discovery_of_its_own(ray_cluster: TestCluster, tmp_path: Path) -> None:
    assert sum(RayHostDiscovery().find_available_hosts_and_slots().values()) == 4
    assert sum(RayHostDiscovery(use_gpu=True).find_available_hosts_and_slots().values()) == 2
    discovery = TestDiscovery(min_hosts=1, max_hosts=2, change_frequency_s=4)
    settings = ElasticRayExecutor.create_settings(
        min_num_proc=1, elastic_timeout=120, timeout_s=100, discovery=discovery, verbose=0
    )
    executor = ElasticRayExecutor(settings, override_discovery=False, env_vars={"ADDED": "yes"})
    executor.start()
    job = Job(lambda callbacks: executor.run(lambda: train(str(tmp_path), 600), callbacks), tmp_path)
    step = 0
    for expected in (4, 2, 4):  # a node leaves and comes back; the first world may already lack it
        step = job.wait_for_size(expected, after=step)
    results = job.end()
    assert all(result["mean"] == sum(range(600)) for result in results)
    assert {2, 4} == set(results[0]["sizes"])
    assert len(changes(results[0]["sizes"])) >= 3


def test_executables_are_made_on_every_worker_of_an_elastic_job(ray_cluster: TestCluster) -> None:
    class Base:
        def __init__(self, value: int) -> None:
            self.value = value

    executor = RayExecutor(RayExecutor.create_settings(timeout_s=100), min_workers=2, max_workers=2)
    executor.start(Base, executable_args=[5], extra_env_vars={"ADDED": 7})

    def use(base: Any) -> tuple[int, str, int]:
        import hvd_cluster.torch as hvd

        hvd.init()
        return base.value, os.environ["ADDED"], hvd.size()

    assert executor.execute(use) == [(5, "7", 2)] * 2
    with pytest.raises(NotImplementedError, match="elastic"):
        executor.run_remote(use)
    with pytest.raises(NotImplementedError, match="elastic"):
        executor.execute_single(use)
    executor.shutdown()


def test_a_function_that_raises_ends_the_job_with_its_traceback(ray_cluster: TestCluster) -> None:
    def fail() -> None:
        import hvd_cluster.torch as hvd

        hvd.init()
        time.sleep(hvd.rank())  # the first failure has a newcomer started on the other node
        raise ValueError("always")

    with pytest.raises(WorkerFailedError, match="ValueError: always") as raised:
        executor_of(min_workers=2, max_workers=2).run(fail)
    assert str(raised.value).startswith("Traceback")
    assert isinstance(raised.value.__cause__, ValueError)
    assert not raised.value.died


def test_a_reset_limit_ends_the_job(ray_cluster: TestCluster, tmp_path: Path) -> None:
    executor = executor_of(min_workers=1, max_workers=2, reset_limit=0)
    job = Job(lambda callbacks: executor.run(train, args=[str(tmp_path), 2000], callbacks=callbacks), tmp_path)
    job.wait_for(lambda workers: sum(step >= 3 for step, _, _ in workers.values()) == 2)
    os.kill(next(pid for pid, (_, rank, _) in job.workers().items() if rank == 1), signal.SIGKILL)
    with pytest.raises(LaunchError, match="number of resets during elastic job exceeded limit: 0"):
        job.end()


def test_one_that_raises_before_there_is_a_world_is_not_tried_elsewhere(ray_cluster: TestCluster) -> None:
    class Broken:
        def __init__(self) -> None:
            raise ValueError("no such file")

    executor = RayExecutor(RayExecutor.create_settings(timeout_s=100), min_workers=2, max_workers=2)
    executor.start(Broken)
    began_s = time.monotonic()
    with pytest.raises(WorkerFailedError, match="ValueError: no such file"):
        executor.execute(lambda broken: None)
    assert time.monotonic() - began_s < 100  # elastic_timeout is 600 s


def test_too_few_resources_are_waited_for_no_longer_than_said(ray_cluster: TestCluster, tmp_path: Path) -> None:
    settings = RayExecutor.create_settings(placement_group_timeout_s=2, timeout_s=100)
    with pytest.raises(
        StartTimeoutError, match=r"no room for min_workers=9 within 2 s: the job needs 9 CPUs; the .* 4"
    ):
        RayExecutor(settings, min_workers=9).start()
    first, second = (RayExecutor(settings, min_workers=4, elastic_timeout=3, max_workers=4) for _ in range(2))
    first.start()
    second.start()  # there is room now; when it runs, there is none
    job = Job(lambda callbacks: first.run(train, args=[str(tmp_path), 2000], callbacks=callbacks), tmp_path)
    job.wait_for(lambda workers: len(workers) == 4)
    with pytest.raises(LaunchError, match="minimum number of slots"):
        second.run(train, args=[str(tmp_path)])
    job.end()


def test_a_callback_that_raises_ends_the_job(ray_cluster: TestCluster, tmp_path: Path) -> None:
    def enough(info: dict[str, Any]) -> None:
        raise KeyError("enough")

    executor = executor_of(min_workers=2, max_workers=2)
    with pytest.raises(KeyError, match="enough"):
        executor.run(train, args=[str(tmp_path), 1000], callbacks=[enough])
