"""The living nodes of the Ray cluster."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hvd_cluster.ray.session import load_ray


@dataclass(frozen=True)
class Node:
    """A node.

    Several nodes may have one address if they run on one machine, as in a test cluster.
    """

    node_id: str
    #: Its address for the other nodes.
    address: str
    hostname: str
    #: All its resources, used or not, by Ray's names.
    resources: Mapping[str, float]

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> Node:
        """From an entry of ``ray.nodes()``."""
        return cls(
            node_id=entry["NodeID"],
            address=entry["NodeManagerAddress"],
            hostname=entry["NodeManagerHostname"],
            resources=dict(entry.get("Resources") or {}),
        )


def living() -> list[Node]:
    """The nodes that Ray considers alive. It notices a death after about 14 s."""
    return [Node.of(entry) for entry in load_ray().nodes() if is_alive(entry)]


def is_alive(entry: Mapping[str, Any]) -> bool:
    """Whether an entry of ``ray.nodes()`` is alive.

    The spelling of the key depends on Ray's version.
    """
    return bool(entry.get("Alive", entry.get("alive", False)))


def own_address() -> str:
    """The address of this process's node."""
    return str(load_ray().util.get_node_ip_address())


def free_by_node() -> Mapping[str, Mapping[str, float]]:
    """Node id -> its free resources, by Ray's names.

    They are all its resources if this Ray does not report free ones.
    """
    free: defaultdict[str, Mapping[str, float]] = defaultdict(dict, {node.node_id: node.resources for node in living()})
    ask = getattr(load_ray()._private.state, "available_resources_per_node", None)
    if ask is not None:
        free.update(ask())
    return free
