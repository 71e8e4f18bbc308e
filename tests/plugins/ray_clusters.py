"""A Ray cluster of several nodes on this machine, one for each module that asks for it.

The fixture ``ray_cluster`` is a :class:`TestCluster` whose driver is the test's own process. After each test no actor
of ours and no placement group may be left.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

#: What each node of a cluster has.
CPUS_PER_NODE = 2
FAKE_GPUS = 2
_STORE_BYTES = 100 * 2**20
_GRACE_S = 20.0


class TestCluster:
    """Two nodes: the head, and one with fake GPUs."""

    __test__ = False

    def __init__(self, folder: Path) -> None:
        from ray.cluster_utils import Cluster

        self.folder = folder
        head = {"num_cpus": CPUS_PER_NODE, "include_dashboard": False, "object_store_memory": _STORE_BYTES}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self.head = self._cluster.head_node
        self.gpu_node = self.add_node(num_gpus=FAKE_GPUS)

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add_node(self, num_cpus: int = CPUS_PER_NODE, **more: Any) -> Any:
        """One more node."""
        return self._cluster.add_node(num_cpus=num_cpus, object_store_memory=_STORE_BYTES, **more)

    def kill_node(self, node: Any) -> None:
        """Its processes die without a word."""
        self._cluster.remove_node(node, allow_graceful=False)

    def await_dead(self, node: Any) -> None:
        """Wait until Ray has noticed."""
        import ray

        deadline_s = time.monotonic() + 60
        while any(entry["NodeID"] == node.node_id and entry["Alive"] for entry in ray.nodes()):
            assert time.monotonic() < deadline_s
            time.sleep(0.2)

    def close(self) -> None:
        self._cluster.shutdown()


def left_on_ray() -> list[str]:
    """Actors that live, and placement groups that hold resources.

    The actors that Ray's own libraries keep for later uses in the same cluster have names; ours have none.
    """
    import ray
    from ray.util import placement_group_table

    actors = [
        f"actor {actor['ActorClassName']} {name} {actor['State']}"
        for name, actor in ray._private.state.actors().items()
        if not actor["Name"] and actor["State"] != "DEAD"
    ]
    groups = [
        f"placement group {n} {g['state']}" for n, g in placement_group_table().items() if g["state"] != "REMOVED"
    ]
    return actors + groups


def await_nothing_left(timeout_s: float = _GRACE_S) -> list[str]:
    """What is still left on Ray after a while; empty where all is gone."""
    deadline_s = time.monotonic() + timeout_s
    while (left := left_on_ray()) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    return left


@contextlib.contextmanager
def ray_folder() -> Iterator[Path]:
    """A temporary folder for Ray whose path is short: sockets lie in it."""
    folder = Path(tempfile.mkdtemp(prefix="hvdr", dir="/tmp"))
    before = os.environ.get("RAY_TMPDIR")
    os.environ["RAY_TMPDIR"] = str(folder)
    try:
        yield folder
    finally:
        if before is None:
            del os.environ["RAY_TMPDIR"]
        else:
            os.environ["RAY_TMPDIR"] = before
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def _ray_cluster() -> Iterator[TestCluster]:
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
    with ray_folder() as folder:
        cluster = TestCluster(folder)
        try:
            ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
            yield cluster
        finally:
            ray.shutdown()
            cluster.close()


@pytest.fixture
def ray_cluster(_ray_cluster: TestCluster) -> Iterator[TestCluster]:
    """Two nodes with two CPUs each; the second one also has two fake GPUs."""
    yield _ray_cluster
    assert await_nothing_left() == []
