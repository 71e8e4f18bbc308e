"""The executor of a Ray Client's process, in an actor of the cluster; test_ray_start.py has it in such a process."""

from __future__ import annotations

import pytest
from ray_clusters import TestCluster

from hvd_cluster.ray import RayExecutor
from hvd_cluster.ray.client import ClientAdapter
from hvd_cluster.ray.spec import ExecutorSpec

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_an_executor_whose_actor_has_died_shuts_down_and_starts_again(ray_cluster: TestCluster) -> None:
    import ray

    adapter = ClientAdapter(
        ExecutorSpec(settings=RayExecutor.create_settings(timeout_s=100), num_workers=1), RayExecutor
    )
    adapter.start()
    ray.kill(adapter._actor)
    adapter.shutdown()
    adapter.start()
    ray.kill(adapter._actor)
    adapter.start()
    assert adapter.run(lambda: 7) == [7]
    adapter.shutdown()
