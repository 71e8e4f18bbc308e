"""RayExecutor on a cluster of two nodes: results, places, executables, output, failures."""

from __future__ import annotations

import inspect
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from ray_clusters import FAKE_GPUS, TestCluster, await_nothing_left

from hvd_cluster.errors import LaunchError, NotEnoughSlotsError, StartTimeoutError, WorkerFailedError
from hvd_cluster.ray import RayExecutor, run

PLACE = [*("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"), "HOROVOD_CROSS_RANK"]
PLACE += ["HOROVOD_CROSS_SIZE", "RANK", "WORLD_SIZE", "LOCAL_RANK"]


def environment(*names: str) -> list[str | None]:
    return [os.environ.get(name) for name in names]


class Counter:
    """An executable with a state."""

    def __init__(self, start: int, step: int = 1) -> None:
        self.value = start
        self.step = step

    def up(self) -> int:
        self.value += self.step
        return self.value


@pytest.fixture(scope="module")
def four(_ray_cluster: TestCluster) -> Iterator[RayExecutor]:
    """Four workers, two on each node, each with a Counter."""
    executor = RayExecutor(RayExecutor.create_settings(timeout_s=100), num_workers=4)
    executor.start(Counter, executable_args=[10], executable_kwargs={"step": 2}, extra_env_vars={"ADDED": 1})
    yield executor
    executor.shutdown()
    assert await_nothing_left() == []


@pytest.mark.usefixtures("_ray_cluster")
def test_run_takes_none_for_every_argument() -> None:
    given = dict.fromkeys(inspect.signature(run).parameters)
    assert run(**{**given, "fn": int, "num_proc": 1}) == [0]


@pytest.mark.usefixtures("_ray_cluster")
def test_a_callback_that_raises_ends_the_workers_and_the_next_call_says_so() -> None:
    def log() -> None:
        from hvd_cluster.ray import ray_logger

        ray_logger.log({"step": 1})

    def fail(_: Any) -> None:
        raise ValueError("the tracking server is down")

    with RayExecutor(num_workers=1) as executor:
        with pytest.raises(ValueError, match="the tracking server is down"):
            executor.run(log, callbacks=[fail])
        with pytest.raises(LaunchError, match=r"no workers: a callback of an earlier call .* Call start\(\) first"):
            executor.run(int)


@pytest.mark.slow
@pytest.mark.usefixtures("_ray_cluster")
def test_the_group_of_torch_distributed_exists_if_asked_for() -> None:
    def total() -> tuple[str, float]:
        import torch
        import torch.distributed as dist

        tensor = torch.tensor([dist.get_rank() + 1.0])
        dist.all_reduce(tensor)
        return dist.get_backend(), tensor.item()

    assert run(total, num_proc=2, torch_backend="hvd") == [("hvd", 3.0)] * 2


@pytest.mark.slow
@pytest.mark.usefixtures("_ray_cluster")
def test_each_call_of_all_workers_gets_a_group_and_one_of_rank_0_alone_none() -> None:
    import ray

    def size() -> int:
        import torch.distributed as dist

        return dist.get_world_size()

    def is_in_group(_: None) -> bool:
        import torch.distributed as dist

        return dist.is_initialized()

    with RayExecutor(num_workers=2) as executor:
        executor.start(extra_env_vars={"HOROVOD_TORCH_BACKEND": "hvd"})
        assert executor.execute_single(is_in_group) is False
        assert ray.get(executor.run_remote(size)) == [2, 2]
        assert executor.run(size) == [2, 2]


def test_four_workers_on_two_nodes_know_their_places(four: RayExecutor) -> None:
    places = four.run(environment, args=[*PLACE, "ADDED"])
    assert [place[0] for place in places] == ["0", "1", "2", "3"]
    assert [place[2:6] for place in places] == [
        ["0", "2", "0", "2"],
        ["1", "2", "0", "2"],
        ["0", "2", "1", "2"],
        ["1", "2", "1", "2"],
    ]
    for place in places:
        assert place[1] == place[7] == "4"
        assert place[6] == place[0]
        assert place[8] == place[2]
        assert place[9] == "1"


def test_four_workers_reduce_and_gather_and_broadcast(four: RayExecutor) -> None:
    def collectives(factor: float) -> dict[str, Any]:
        import torch

        import hvd_cluster.torch as hvd

        hvd.init()
        mine = torch.arange(3.0) * factor + hvd.rank()
        return {
            "sum": hvd.allreduce(mine, op=hvd.Sum).tolist(),
            "gathered": hvd.allgather(torch.tensor([hvd.rank()])).tolist(),
            "from 2": hvd.broadcast(mine, root_rank=2).tolist(),
        }

    for result in four.run(collectives, kwargs={"factor": 2.0}):
        assert result == {"sum": [6.0, 14.0, 22.0], "gathered": [0, 1, 2, 3], "from 2": [2.0, 4.0, 6.0]}


def test_plain_torch_distributed_finds_its_variables(four: RayExecutor) -> None:
    def total() -> float:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        tensor = torch.tensor([dist.get_rank() + 1.0])
        dist.all_reduce(tensor)
        dist.destroy_process_group()
        return tensor.item()

    assert four.run(total) == [10.0] * 4


def test_executables_keep_their_state_from_call_to_call(four: RayExecutor) -> None:
    assert four.execute(lambda counter: counter.up()) == [12] * 4
    assert four.execute(lambda counter: counter.up()) == [14] * 4
    assert four.execute_single(lambda counter: counter.up()) == 16
    assert four.execute(lambda counter: counter.value) == [16, 14, 14, 14]


def test_run_remote_returns_references_and_leaves_errors_to_ray(four: RayExecutor) -> None:
    import ray

    refs = four.run_remote(lambda base: base + int(os.environ["HOROVOD_RANK"]), args=[100])
    assert ray.get(refs) == [100, 101, 102, 103]

    def fail() -> None:
        raise ZeroDivisionError("on purpose")

    for ref in four.run_remote(fail):
        with pytest.raises(ZeroDivisionError, match="on purpose"):
            ray.get(ref)
    assert four.run(lambda: 7) == [7] * 4


def test_output_comes_with_the_rank_in_front_and_before_the_result(
    four: RayExecutor, capfd: pytest.CaptureFixture[str]
) -> None:
    def talk() -> None:
        print("to stdout")
        print("déjà vu", file=sys.stderr)
        os.write(1, b"past Python\n")

    four.run(talk)
    captured = capfd.readouterr()
    for rank in range(4):
        assert f"[{rank}]<stdout>:to stdout\n" in captured.out
        assert f"[{rank}]<stdout>:past Python\n" in captured.out
        assert f"[{rank}]<stderr>:déjà vu\n" in captured.err


def test_the_progress_bars_of_ray_are_not_output(four: RayExecutor, capsys: pytest.CaptureFixture[str]) -> None:
    def draw() -> None:
        from ray.experimental import tqdm_ray

        for step in tqdm_ray.tqdm(range(3), total=3):
            print("step", step)

    four.run(draw)
    captured = capsys.readouterr().out
    assert "[0]<stdout>:step 2\n" in captured
    assert "magic_token" not in captured


def test_callbacks_get_what_workers_log(four: RayExecutor) -> None:
    def train() -> None:
        from hvd_cluster.ray import ray_logger

        for step in range(2):
            ray_logger.log({"rank": int(os.environ["HOROVOD_RANK"]), "step": step})

    seen: list[tuple[int, int]] = []
    four.run(train, callbacks=[lambda info: seen.append((info["rank"], info["step"]))])
    assert sorted(seen) == [(rank, step) for rank in range(4) for step in range(2)]


def test_callbacks_of_one_call_are_not_those_of_the_next(four: RayExecutor) -> None:
    import ray

    def log(text: str) -> None:
        from hvd_cluster.ray import ray_logger

        ray_logger.log({"said": text})

    seen: list[str] = []
    four.run(log, args=["first"], callbacks=[lambda info: seen.append(info["said"])])
    ray.get(four.run_remote(log, args=["second"]))
    four.run(log, args=["third"])
    assert seen == ["first"] * 4


def test_large_arguments_and_results_get_through(four: RayExecutor) -> None:
    blob = os.urandom(3_000_000)
    assert four.run(lambda data: data[::-1], args=[blob]) == [blob[::-1]] * 4


def test_the_users_own_traceback_comes_first_and_the_workers_continue(four: RayExecutor) -> None:
    def step() -> None:
        raise ValueError("a bad batch")

    def train() -> None:
        step()

    with pytest.raises(WorkerFailedError) as raised:
        four.run(train)
    text = str(raised.value)
    assert text.startswith("Traceback (most recent call last):")
    assert text.index("in train") < text.index("in step") < text.index("ValueError: a bad batch") < text.index("Rank ")
    assert "site-packages/ray" not in text
    assert isinstance(raised.value.__cause__, ValueError)
    assert four.run(environment, args=["RANK"]) == [["0"], ["1"], ["2"], ["3"]]


def test_what_cannot_be_pickled_is_named(four: RayExecutor) -> None:
    import threading

    lock = threading.Lock()
    with pytest.raises(LaunchError, match="captured variable 'lock'"):
        four.run(lambda: lock.locked())


def test_missing_resources_fail_in_time_and_say_what_is_missing(ray_cluster: TestCluster, four: RayExecutor) -> None:
    settings = RayExecutor.create_settings(placement_group_timeout_s=2)
    executor = RayExecutor(settings, num_workers=8, cpus_per_worker=0, use_gpu=True)
    began_s = time.monotonic()
    four.shutdown()
    with pytest.raises(StartTimeoutError, match="needs 8 GPUs; the cluster has 2, 2 free") as raised:
        executor.start()
    assert "Placement group creation timed out" in str(raised.value)
    assert isinstance(raised.value, TimeoutError)
    assert time.monotonic() - began_s < 30
    with pytest.raises(StartTimeoutError, match=r"needs 3 nodes with 1 CPU each; the cluster has 2 such nodes among 2"):
        RayExecutor(settings, num_hosts=3).start()
    with pytest.raises(ValueError, match="the number of workers is missing"):
        RayExecutor(settings).start()


def test_each_worker_of_a_node_owns_another_gpu(ray_cluster: TestCluster) -> None:
    settings = RayExecutor.create_settings(timeout_s=100)
    with RayExecutor(settings, num_workers=FAKE_GPUS, use_gpu=True) as executor:
        found = executor.run(environment, args=["CUDA_VISIBLE_DEVICES", "LOCAL_RANK"])
    own = [str(devices).split(",")[int(str(local_rank))] for devices, local_rank in found]
    assert sorted(own) == ["0", "1"]
    assert len({devices for devices, _ in found}) == 1


def test_hosts_and_workers_per_host_spread_over_the_nodes(ray_cluster: TestCluster) -> None:
    settings = RayExecutor.create_settings(timeout_s=100)
    with RayExecutor(settings, num_hosts=2, num_workers_per_host=2) as executor:
        found = executor.run(environment, args=["HOROVOD_CROSS_RANK", "HOROVOD_LOCAL_RANK"])
    assert found == [["0", "0"], ["0", "1"], ["1", "0"], ["1", "1"]]


@pytest.mark.slow
def test_inside_a_placement_group_the_workers_take_its_bundles(ray_cluster: TestCluster) -> None:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = ray.util.placement_group([{"CPU": 0.5}, {"CPU": 1}, {"CPU": 1}])
    ray.get(group.ready())

    @ray.remote(num_cpus=0.5, max_retries=0)
    def trial() -> tuple[list[str], int, str]:
        from ray.util import placement_group_table

        with RayExecutor(RayExecutor.create_settings(timeout_s=100)) as executor:  # as many as there is room for
            sizes = executor.run(lambda: os.environ["HOROVOD_SIZE"])
            num_groups = sum(one["state"] == "CREATED" for one in placement_group_table().values())
        try:
            RayExecutor(RayExecutor.create_settings(), num_workers=3).start()
        except NotEnoughSlotsError as error:
            return sizes, num_groups, str(error)
        return sizes, num_groups, ""

    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
    try:
        sizes, num_groups, refusal = ray.get(trial.options(scheduling_strategy=strategy).remote())
    finally:
        ray.util.remove_placement_group(group)
    assert (sizes, num_groups) == (["2", "2"], 1)
    assert "room for 2 workers of 1 CPU each in addition to itself, but 3 are needed" in refusal


def test_an_executable_that_raises_leaves_nothing(ray_cluster: TestCluster) -> None:
    class Broken:
        def __init__(self) -> None:
            raise ValueError("no such file")

    executor = RayExecutor(RayExecutor.create_settings(timeout_s=100), num_workers=2)
    with pytest.raises(WorkerFailedError, match="no such file"):
        executor.start(Broken)
    with pytest.raises(LaunchError, match="it did not start"):
        executor.run(print)


def test_run_starts_and_ends_workers_for_one_call(ray_cluster: TestCluster) -> None:
    import io

    out = io.StringIO()
    events: list[Any] = []

    def work(base: int) -> int:
        from hvd_cluster.launch.progress import report

        rank = int(os.environ["RANK"])
        print("hello")
        report(done=rank)
        return base + rank

    found = run(work, (5,), num_proc=2, stdout=out, on_event=lambda rank, fields: events.append((rank, fields)))
    assert found == [5, 6]
    assert sorted(out.getvalue().splitlines()) == ["[0]<stdout>:hello", "[1]<stdout>:hello"]
    assert sorted(events) == [(0, {"done": 0}), (1, {"done": 1})]


@pytest.mark.slow
def test_a_program_may_start_and_place_workers_by_itself(ray_cluster: TestCluster) -> None:
    import ray

    from hvd_cluster.ray import BaseHorovodWorker
    from hvd_cluster.ray.coordinator import Coordinator

    class Tally:  # Ray itself pickles this: a class of this module could not be imported there
        def __init__(self, value: int, step: int) -> None:
            self.total = value + step

    actor_class = ray.remote(BaseHorovodWorker)
    workers = [actor_class.options(num_cpus=1).remote(world_rank=rank, world_size=2) for rank in range(2)]
    coordinator = Coordinator(RayExecutor.create_settings())
    for rank, worker in enumerate(workers):
        hostname, node_id = ray.get([worker.hostname.remote(), worker.node_id.remote()])
        coordinator.register(hostname, node_id, rank)
    places = coordinator.finalize_registration()
    shared = coordinator.establish_rendezvous()
    try:
        for rank, worker in enumerate(workers):
            ray.get(worker.update_env_vars.remote({**shared, **places[rank]}))
            ray.get(worker.start_executable.remote(Tally, rank, step=10))

        def total(tally: Any) -> float:
            import torch

            import hvd_cluster.torch as hvd

            hvd.init()
            return hvd.allreduce(torch.tensor(float(tally.total)), op=hvd.Sum).item()

        assert ray.get([worker.execute.remote(total) for worker in workers]) == [21.0, 21.0]
        assert ray.get(workers[1].env_vars.remote())["HOROVOD_RANK"] == "1"
        assert ray.get(workers[0].get_gpu_ids.remote()) == []
    finally:
        for worker in workers:
            ray.kill(worker)
        coordinator.close()
