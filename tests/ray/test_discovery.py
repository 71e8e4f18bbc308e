from __future__ import annotations

from hvd_cluster.ray.discovery import node_of, slots_by_host
from hvd_cluster.ray.resources import WorkerResources


def test_nodes_are_hosts_and_those_without_room_are_left_out() -> None:
    assert slots_by_host({"a": 2, "b": 0, "c": 1}, WorkerResources(1)) == {"a": 2, "c": 1}


def test_each_gpus_worker_is_alone_on_a_host() -> None:
    hosts = slots_by_host({"a": 2, "b": 1}, WorkerResources(1, 1))
    assert hosts == {"a/0": 1, "a/1": 1, "b/0": 1}
    assert [node_of(host) for host in hosts] == ["a", "a", "b"]
