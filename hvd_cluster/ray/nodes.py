"""The nodes of the Ray cluster that are alive."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hvd_cluster.ray.session import load_ray


@dataclass(frozen=True)
class Node:
    """One of them. Several nodes may have one address: then they run on one machine, as those of a test cluster do."""

    node_id: str
    #: Where its workers are for the other nodes.
    address: str
    hostname: str
    #: All that it has, used or not, by Ray's names.
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
    """Those that Ray holds for alive. It notices a death after some 14 s."""
    return [Node.of(entry) for entry in load_ray().nodes() if is_alive(entry)]


def is_alive(entry: Mapping[str, Any]) -> bool:
    """Whether an entry of ``ray.nodes()`` says so; releases of Ray spell the key differently."""
    return bool(entry.get("Alive", entry.get("alive", False)))


def own_address() -> str:
    """The address of this process's own node."""
    return str(load_ray().util.get_node_ip_address())


def free_by_node() -> Mapping[str, Mapping[str, float]]:
    """Node id -> what is free there, by Ray's names; all that a node has where this Ray cannot tell."""
    free: defaultdict[str, Mapping[str, float]] = defaultdict(dict, {node.node_id: node.resources for node in living()})
    ask = getattr(load_ray()._private.state, "available_resources_per_node", None)
    if ask is not None:
        free.update(ask())
    return free
