from __future__ import annotations

import pytest

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


def test_ranks_that_alternate_between_nodes_are_refused() -> None:
    coordinator = Coordinator(MiniSettings())
    for rank, node in enumerate(["a", "b", "a"]):
        coordinator.register(node, node, rank)
    with pytest.raises(ValueError, match="follow each other"):
        coordinator.finalize_registration()
