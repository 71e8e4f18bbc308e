"""Places workers that a program has started itself.

Horovod's programs for other schedulers do so.
"""

from __future__ import annotations

import uuid
from typing import Any

from hvd_cluster.launch.environment import interface_variables
from hvd_cluster.launch.placement import Slot, place
from hvd_cluster.ray import nodes
from hvd_cluster.rendezvous.secret import new_secret
from hvd_cluster.rendezvous.server import KeyValueServer
from hvd_cluster.topology import Topology, join_address

#: Variables of a topology that differ between workers.
_OF_ONE_WORKER = [
    *(f"HOROVOD_{scope}{what}" for scope in ("", "LOCAL_", "CROSS_") for what in ("RANK", "SIZE")),
    *("HOROVOD_HOSTNAME", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
]


class Coordinator:
    """Collects where workers run, and assigns their local and cross ranks.

    The ranks of a node may be any.

    Args:
        settings: those of ``RayExecutor`` or of ``ray.train.horovod``, or any object with ``nics``. If it has a
            ``timeout_s``, workers wait for each other that long in ``hvd.init()``.
    """

    def __init__(self, settings: Any) -> None:
        self.settings = settings
        self._nodes: dict[int, str] = {}
        self._hostnames: dict[int, str] = {}
        self._server: KeyValueServer | None = None

    @property
    def world_size(self) -> int:
        """Number of registered workers."""
        return len(self._nodes)

    @property
    def hostnames(self) -> set[str]:
        """The host names of their machines."""
        return set(self._hostnames.values())

    @property
    def node_id_string(self) -> str:
        """ "node:workers" for each node, separated by commas, in the order of the ranks."""
        on_nodes = [self._nodes[rank] for rank in sorted(self._nodes)]
        return ",".join(f"{node}:{on_nodes.count(node)}" for node in dict.fromkeys(on_nodes))

    def register(self, hostname: str, node_id: str, world_rank: int) -> None:
        """Register the worker with that rank on that node."""
        self._hostnames[world_rank], self._nodes[world_rank] = hostname, node_id

    def finalize_registration(self) -> dict[int, dict[str, Any]]:
        """Rank -> the variables of its local and cross ranks and sizes.

        Raises:
            ValueError: no worker has registered, or the ranks are not 0, 1, 2, ...
        """
        if not self._nodes or sorted(self._nodes) != list(range(len(self._nodes))):
            raise ValueError(f"workers must register with the ranks 0, 1, 2, ...: {sorted(self._nodes)} have")
        placements = place([Slot(rank, node, self._hostnames[rank]) for rank, node in self._nodes.items()])
        return {
            placement.slot.index: {
                "HOROVOD_CROSS_RANK": placement.cross_rank,
                "HOROVOD_CROSS_SIZE": placement.cross_size,
                "HOROVOD_LOCAL_RANK": placement.local_rank,
                "HOROVOD_LOCAL_SIZE": placement.local_size,
            }
            for placement in sorted(placements, key=lambda placement: placement.slot.index)
        }

    def establish_rendezvous(self) -> dict[str, str]:
        """Open the job's key-value store here; return the variables that lead to it."""
        secret = new_secret()
        address = nodes.own_address()
        self._server = KeyValueServer(secret, address)
        shared = Topology(
            rendezvous=join_address(address, self._server.port),
            secret=secret,
            job_id=uuid.uuid4().hex[:12],
        ).to_env()
        variables = {name: value for name, value in shared.items() if name not in _OF_ONE_WORKER}
        if (timeout_s := getattr(self.settings, "timeout_s", None)) is not None:
            variables["HOROVOD_GLOO_TIMEOUT_SECONDS"] = f"{timeout_s:g}"
        return {**variables, **interface_variables(self.settings.nics)}

    def close(self) -> None:
        """Close the store."""
        if self._server is not None:
            self._server.close()
