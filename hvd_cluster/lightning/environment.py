"""The ranks of this worker, as Lightning's cluster environment."""

from __future__ import annotations

from typing import Any

from hvd_cluster.engine import basics
from hvd_cluster.lightning.installed import submodule
from hvd_cluster.topology import Topology, split_address

_ClusterEnvironment: Any = submodule("fabric.plugins.environments").ClusterEnvironment


class HorovodEnvironment(_ClusterEnvironment):
    """The world of ``hvd.init()``, which is called when Lightning first needs a rank."""

    @property
    def creates_processes_externally(self) -> bool:
        """Always True: the launcher has started the workers."""
        return True

    @property
    def main_address(self) -> str:
        """The host of torch.distributed's rendezvous; empty without a launcher."""
        return split_address(Topology.from_env().master)[0]

    @property
    def main_port(self) -> int:
        """The port of torch.distributed's rendezvous; 0 without a launcher."""
        return int(split_address(Topology.from_env().master)[1] or 0)

    @staticmethod
    def detect() -> bool:
        """Whether one of our launchers started this process."""
        return Topology.from_env().launcher == "hvd_cluster"

    def world_size(self) -> int:
        """The number of workers."""
        basics.init()
        return basics.size()

    def global_rank(self) -> int:
        """Index of this worker over all workers."""
        basics.init()
        return basics.rank()

    def local_rank(self) -> int:
        """Index of this worker over the workers of its host."""
        basics.init()
        return basics.local_rank()

    def node_rank(self) -> int:
        """Index of this host over the hosts."""
        basics.init()
        return basics.cross_rank()

    def set_world_size(self, size: int) -> None:
        """Does nothing: the launcher determines the size."""

    def set_global_rank(self, rank: int) -> None:
        """Does nothing: the launcher determines the rank."""
