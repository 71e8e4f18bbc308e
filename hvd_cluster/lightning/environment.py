"""Who this worker is, in Lightning's words."""

from __future__ import annotations

from typing import Any

from hvd_cluster.engine import basics
from hvd_cluster.lightning.installed import submodule
from hvd_cluster.topology import Topology, split_address

_ClusterEnvironment: Any = submodule("fabric.plugins.environments").ClusterEnvironment


class HorovodEnvironment(_ClusterEnvironment):
    """The world of ``hvd.init()``, which is entered when Lightning first asks for it."""

    @property
    def creates_processes_externally(self) -> bool:
        """Always: the launcher has started the workers."""
        return True

    @property
    def main_address(self) -> str:
        """Where torch.distributed would meet; empty in a process that no launcher started."""
        return split_address(Topology.from_env().master)[0]

    @property
    def main_port(self) -> int:
        """The port there; 0 in a process that no launcher started."""
        return int(split_address(Topology.from_env().master)[1] or 0)

    @staticmethod
    def detect() -> bool:
        """Whether a launcher of ours has started this process."""
        return Topology.from_env().launcher == "hvd_cluster"

    def world_size(self) -> int:
        """The number of workers."""
        basics.init()
        return basics.size()

    def global_rank(self) -> int:
        """Index over all workers."""
        basics.init()
        return basics.rank()

    def local_rank(self) -> int:
        """Index over the workers of this host."""
        basics.init()
        return basics.local_rank()

    def node_rank(self) -> int:
        """Index over the hosts."""
        basics.init()
        return basics.cross_rank()

    def set_world_size(self, size: int) -> None:
        """Does nothing: the world is as it is."""

    def set_global_rank(self, rank: int) -> None:
        """Does nothing: the rank is as it is."""
