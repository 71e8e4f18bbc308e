"""Each worker owns one GPU: CUDA_VISIBLE_DEVICES lists the job's GPUs of its node in the order of local ranks."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from ray_clusters import TestCluster

from hvd_cluster.ray import ElasticRayExecutor, RayExecutor
from hvd_cluster.ray.elastic import RayHostDiscovery

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def look() -> dict[str, Any]:
    """What a worker sees, and what Ray has assigned to it."""
    import ray

    import hvd_cluster.torch as hvd

    hvd.init()
    return {
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "assigned": ray.get_runtime_context().get_accelerator_ids()["GPU"],
        "local": (hvd.local_rank(), hvd.local_size()),
        "cross": (hvd.cross_rank(), hvd.cross_size()),
    }


def check(found: list[dict[str, Any]], visible: str) -> None:
    """Each worker's own GPU stands at its local rank, and all workers of the one node see one list."""
    assert [one["local"] for one in sorted(found, key=lambda one: one["local"])] == [
        (rank, len(found)) for rank in range(len(found))
    ]
    assert {one["cross"] for one in found} == {(0, 1)}
    for one in found:
        assert one["visible"].split(",")[one["local"][0]] == one["assigned"][0]
    assert len({one["visible"] for one in found}) == 1
    assert sorted(found[0]["visible"].split(",")) == visible.split(",")


def elastic(**arguments: Any) -> RayExecutor:
    executor = RayExecutor(RayExecutor.create_settings(timeout_s=100), elastic_timeout=120, **arguments)
    executor.start()
    return executor


def test_elastic_workers_of_a_node_have_local_ranks_and_a_gpu_each(ray_cluster: TestCluster) -> None:
    check(elastic(min_workers=2, max_workers=2, use_gpu=True).run(look), "0,1")


def test_a_discovery_of_ones_own_may_offer_several_gpu_slots_of_a_node(ray_cluster: TestCluster) -> None:
    settings = ElasticRayExecutor.create_settings(
        min_num_proc=2, max_num_proc=2, elastic_timeout=120, timeout_s=100, discovery=RayHostDiscovery(use_gpu=True)
    )
    executor = ElasticRayExecutor(settings, use_gpu=True, override_discovery=False)
    executor.start()
    check(executor.run(look), "0,1")


def test_workers_of_two_gpus_each_find_their_own_first_at_their_local_rank(ray_cluster: TestCluster) -> None:
    four = ray_cluster.add_node(num_gpus=4)
    with RayExecutor(
        RayExecutor.create_settings(timeout_s=100), num_hosts=1, num_workers_per_host=2, use_gpu=True, gpus_per_worker=2
    ) as executor:
        check(executor.run(look), "0,1,2,3")
    check(train_with_two_gpus_each(), "0,1,2,3")
    ray_cluster.kill_node(four)
    ray_cluster.await_dead(four)


def train_with_two_gpus_each() -> list[dict[str, Any]]:
    """The same from the workers of a Ray Train run."""
    import inspect
    import tempfile

    from ray.train import RunConfig, ScalingConfig

    from hvd_cluster.ray.train import HorovodTrainer

    source = inspect.getsource(look)  # Ray's workers could not import this module

    with tempfile.TemporaryDirectory() as folder:

        def loop() -> None:
            import json
            import os
            from pathlib import Path
            from typing import Any

            names: dict[str, Any] = {"os": os, "Any": Any}
            exec(source, names)
            found = names["look"]()
            Path(folder, f"{os.environ['RANK']}").write_text(json.dumps(found))

        HorovodTrainer(
            loop,
            scaling_config=ScalingConfig(num_workers=2, use_gpu=True, resources_per_worker={"CPU": 0.5, "GPU": 2}),
            run_config=RunConfig(storage_path=folder, name="gpus"),
        ).fit()
        found = [json.loads(Path(folder, str(rank)).read_text()) for rank in range(2)]
    return [{**one, "local": tuple(one["local"]), "cross": tuple(one["cross"])} for one in found]


def test_the_worker_in_a_dead_ones_place_takes_its_gpu_and_the_other_one_keeps_its_own(
    ray_cluster: TestCluster, tmp_path: Path
) -> None:
    folder = str(tmp_path)

    def train() -> list[Any]:
        import hvd_cluster.torch as hvd

        hvd.init()
        state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, step=0)

        @hvd.elastic.run
        def loop(state: Any) -> list[Any]:
            while state.step < 40:
                state.step += 1
                if hvd.rank() == 1 and state.step == 5 and not Path(folder, "died").exists():
                    Path(folder, "died").touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(0.02)
                state.commit()
            return hvd.allgather_object(look())

        return loop(state)

    found = elastic(min_workers=2, max_workers=2, use_gpu=True, cooldown_range=(1, 1)).run(train)
    assert (tmp_path / "died").exists()
    check(found[0], "0,1")


@pytest.mark.parametrize("arguments", [{"num_workers": 4}, {"min_workers": 4, "max_workers": 4}])
def test_workers_without_gpus_see_none(ray_cluster: TestCluster, arguments: dict[str, int]) -> None:
    with RayExecutor(RayExecutor.create_settings(timeout_s=100), **arguments) as executor:
        assert {one["visible"] for one in executor.run(look)} == {""}
