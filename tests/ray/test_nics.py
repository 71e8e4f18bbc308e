"""``horovod.ray.utils``: the interfaces that all nodes have."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
from ray_clusters import TestCluster

from hvd_cluster.errors import LaunchError
from hvd_cluster.ray import BaseHorovodWorker, RayExecutor, nics
from hvd_cluster.ray.nics import detect_nics
from hvd_cluster.rendezvous.addresses import outward_interfaces


def test_this_process_is_meant_where_there_are_no_workers() -> None:
    here = set(outward_interfaces())
    if not here:
        pytest.skip("this machine has no network interface but the loopback")
    assert detect_nics(RayExecutor.create_settings()) == here
    one = sorted(here)[0]
    assert detect_nics(RayExecutor.create_settings(nics=one)) == {one}
    with pytest.raises(LaunchError, match=f"in common among nics=ib77. They have: node 0: .*{one}"):
        detect_nics(RayExecutor.create_settings(nics="ib77"))


def test_a_bridge_that_has_one_address_on_all_nodes_leads_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [{"docker0": "172.17.0.1", "eth0": f"10.0.0.{index}", "ib0": f"10.1.0.{index}"} for index in (1, 2)]
    monkeypatch.setattr(nics, "map_blocking", lambda fn, workers: nodes)
    settings = SimpleNamespace(nics=None)
    assert detect_nics(settings, node_workers=["a", "b"]) == {"eth0", "ib0"}
    assert detect_nics(SimpleNamespace(nics={"docker0"}), node_workers=["a", "b"]) == {"docker0"}


@pytest.mark.slow
def test_workers_on_the_nodes_are_asked_under_the_old_name(ray_cluster: TestCluster) -> None:
    import ray

    utils = importlib.import_module("hvd_cluster.ray.utils")
    here = set(outward_interfaces())
    if not here:
        pytest.skip("this machine has no network interface but the loopback")
    workers = [ray.remote(BaseHorovodWorker).remote(rank, 2) for rank in range(2)]
    try:
        assert utils.map_blocking(lambda worker: worker.env_vars.remote(), workers)[1]["HOROVOD_RANK"] == "1"
        found = utils.detect_nics(RayExecutor.create_settings(), node_workers=workers)
        assert found == here
        assert set(utils.nics_to_env_var(found)) == {"HOROVOD_GLOO_IFACE", "NCCL_SOCKET_IFNAME"}
    finally:
        for worker in workers:
            ray.kill(worker)
