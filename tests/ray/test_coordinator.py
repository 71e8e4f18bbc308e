from __future__ import annotations

from types import SimpleNamespace

import pytest

from hvd_cluster.launch.horovod.settings import Settings
from hvd_cluster.ray import nodes
from hvd_cluster.ray.coordinator import Coordinator
from hvd_cluster.ray.settings import MiniSettings


def test_workers_are_placed_by_the_nodes_that_they_are_on() -> None:
    coordinator = Coordinator(MiniSettings())
    for rank, node in enumerate(["a", "a", "b", "b", "b"]):
        coordinator.register(f"host-{node}", node, rank)
    assert coordinator.world_size == 5
    assert coordinator.hostnames == {"host-a", "host-b"}
    assert coordinator.node_id_string == "a:2,b:3"
    found = coordinator.finalize_registration()
    names = ["HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE", "HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE"]
    assert [[found[rank][name] for name in names] for rank in range(5)] == [
        [0, 2, 0, 2],
        [1, 2, 0, 2],
        [0, 3, 1, 2],
        [1, 3, 1, 2],
        [2, 3, 0, 1],
    ]


def test_the_ranks_of_a_node_need_not_follow_each_other() -> None:
    coordinator = Coordinator(MiniSettings())
    for node, ranks in {"a": [0, 3, 6], "b": [1, 4, 7], "c": [5, 2]}.items():
        for rank in ranks:
            coordinator.register(node, node, rank)
    found = coordinator.finalize_registration()
    names = ["HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE", "HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE"]
    assert [[found[rank][name] for name in names] for rank in range(8)] == [
        [0, 3, 0, 3],
        [0, 3, 1, 3],
        [0, 2, 2, 3],
        [1, 3, 0, 3],
        [1, 3, 1, 3],
        [1, 2, 2, 3],
        [2, 3, 0, 2],
        [2, 3, 1, 2],
    ]


@pytest.mark.parametrize("ranks", [[], [0, 2]])
def test_ranks_with_a_gap_are_refused(ranks: list[int]) -> None:
    coordinator = Coordinator(MiniSettings())
    for rank in ranks:
        coordinator.register("a", "a", rank)
    with pytest.raises(ValueError, match="0, 1, 2"):
        coordinator.finalize_registration()


def test_settings_of_other_libraries_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "own_address", lambda: "127.0.0.1")
    # The fields of ray.train.horovod.HorovodConfig, and those of horovod.runner.common.util.settings.
    for settings, timeout in [
        (SimpleNamespace(nics={"eth1", "eth0"}, verbose=1, key=b"k", timeout_s=300), "300"),
        (Settings(nics=["eth0"], num_proc=2), None),
        (MiniSettings(), "300"),
    ]:
        coordinator = Coordinator(settings)
        coordinator.register("a", "a", 0)
        variables = coordinator.establish_rendezvous()
        coordinator.close()
        assert variables["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == "127.0.0.1"
        assert variables.get("HOROVOD_GLOO_IFACE") == ("eth0" if settings.nics else None)
        assert variables.get("HOROVOD_GLOO_TIMEOUT_SECONDS") == timeout
        assert not {"HOROVOD_RANK", "HOROVOD_LOCAL_RANK", "RANK"} & set(variables)
