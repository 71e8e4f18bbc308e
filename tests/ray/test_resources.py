from __future__ import annotations

import pytest

from hvd_cluster.ray.resources import WorkerResources, listed, shortage


@pytest.mark.parametrize(
    ("worker", "node", "slots"),
    [
        (WorkerResources(1), {"CPU": 4.0, "GPU": 2.0}, 4),
        (WorkerResources(1, 1), {"CPU": 4.0, "GPU": 2.0}, 2),
        (WorkerResources(3, 1), {"CPU": 8.0, "GPU": 8.0}, 2),
        (WorkerResources(1, 1), {"CPU": 4.0}, 0),
        (WorkerResources(0.1), {"CPU": 0.3}, 3),  # 0.3 / 0.1 is less than 3 in floating point
        (WorkerResources(0, 0), {"CPU": 4.0}, 4),
    ],
)
def test_a_node_has_room_for_as_many_workers_as_its_scarcest_resource_allows(
    worker: WorkerResources, node: dict[str, float], slots: int
) -> None:
    assert worker.slots(node) == slots


def test_a_bundle_names_only_what_is_taken() -> None:
    assert WorkerResources(2, 1).bundle(3) == {"CPU": 6, "GPU": 3}
    assert WorkerResources(1).bundle() == {"CPU": 1}
    assert WorkerResources(0).bundle() == {}


def test_a_shortage_says_what_is_needed_there_and_free() -> None:
    assert shortage({"GPU": 8}, {"CPU": 4, "GPU": 4}, {"CPU": 4, "GPU": 2}) == "needs 8 GPUs; the cluster has 4, 2 free"
    assert shortage({"CPU": 1, "GPU": 1}, {"CPU": 1}, {}) == (
        "needs 1 CPU; the cluster has 1, 0 free, and needs 1 GPU; the cluster has 0, 0 free"
    )
    assert shortage({"CPU": 1}, {"CPU": 4}, {"CPU": 4}) == ""


def test_resources_in_words() -> None:
    assert listed({"CPU": 1, "GPU": 2.0}) == "1 CPU and 2 GPUs"
    assert listed({"CPU": 0.5}) == "0.5 CPUs"
