"""The resources of a worker, and the bundles of the placement group around it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvd_cluster.ray import nodes
from hvd_cluster.ray.session import load_ray


@dataclass(frozen=True)
class WorkerResources:
    """CPUs and GPUs of one worker."""

    cpus: float = 1
    gpus: float = 0

    def bundle(self, num_workers: int = 1) -> dict[str, float]:
        """The resources of ``num_workers`` workers on one node, by Ray's names."""
        wanted = {"CPU": self.cpus * num_workers, "GPU": self.gpus * num_workers}
        return {name: amount for name, amount in wanted.items() if amount}

    def slots(self, resources: Mapping[str, float]) -> int:
        """The number of workers that fit into ``resources``.

        It is the number of CPUs if a worker needs nothing.
        """
        counts = [resources.get(name, 0) / amount for name, amount in self.bundle().items()]
        return math.floor(min(counts, default=math.ceil(resources.get("CPU", 0))) + 1e-9)


def device_env(gpus: Sequence[str]) -> dict[str, str]:
    """Variables that make only these GPUs visible to a worker.

    Ray hides none from a worker without GPUs.
    """
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}


def number(amount: float) -> str:
    """ "3" or "0.5"."""
    return f"{amount:g}"


def listed(resources: Mapping[str, float]) -> str:
    """ "1 CPU and 2 GPUs"."""
    parts = [f"{number(amount)} {name}{'' if amount == 1 else 's'}" for name, amount in resources.items()]
    return " and ".join(parts) or "nothing"


def shortage(needed: Mapping[str, float], total: Mapping[str, float], free: Mapping[str, float]) -> str:
    """What a cluster lacks, with a clause for each missing resource.

    For example "needs 8 GPUs; the cluster has 4, 2 free". Empty if all resources are there and free: then they do not
    fit together on the nodes.
    """
    parts = [
        f"needs {number(amount)} {name}{'' if amount == 1 else 's'}; the cluster has {number(total.get(name, 0))}, "
        f"{number(free.get(name, 0))} free"
        for name, amount in needed.items()
        if amount > free.get(name, 0)
    ]
    return ", and ".join(parts)


@dataclass(frozen=True)
class Bundle:
    """A bundle."""

    index: int
    #: Its node; empty while Ray looks for another node because that one has died.
    node_id: str
    #: Its resources by Ray's names, without those that this program itself uses.
    resources: Mapping[str, float]
    #: Its unused resources. Ray's count is a second late.
    free: Mapping[str, float]

    def slots(self, worker: WorkerResources, num_own: int = 0) -> int:
        """How many workers fit, ``num_own`` of which are there already."""
        max_slots = worker.slots(self.resources)
        # Workers without resources do not compete with others.
        return min(max_slots, num_own + worker.slots(self.free)) if worker.bundle() else max_slots


def current_group() -> Any:
    """The placement group that this program runs in, or None."""
    return load_ray().util.get_current_placement_group()


def in_bundle(group: Any, index: int) -> dict[str, Any]:
    """The options of an actor in that bundle."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return {"scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)}


def bundles_of(group: Any) -> list[Bundle]:
    """The bundles of ``group``, in the order of their indices."""
    table = load_ray().util.placement_group_table(group)
    where: Mapping[int, str] = table["bundles_to_node_id"]
    taken, free = _taken(group), nodes.free_by_node()
    bundles = []
    for index, spec in enumerate(group.bundle_specs):
        node_id = where.get(index, "")
        own = taken.get(index, {})
        rest = {name: amount - own.get(name, 0) for name, amount in spec.items()}
        named = {name: f"{name}_group_{index}_{group.id.hex()}" for name in spec}
        # Ray leaves out resources that are used up.
        unused = {name: free[node_id].get(there, 0) for name, there in named.items()} if node_id else {}
        bundles.append(Bundle(index, node_id, rest, unused))
    return bundles


def described(group: Any, worker: WorkerResources) -> str:
    """What the group has, as the beginning of a sentence about what is needed."""
    bundles = bundles_of(group)
    room = sum(worker.slots(bundle.resources) for bundle in bundles)
    specs = ", ".join(listed(spec) for spec in group.bundle_specs)
    return (
        f"this program runs in a placement group of {_counted(len(bundles), 'bundle')} on "
        f"{_counted(len({bundle.node_id for bundle in bundles}), 'node')} ({specs}), with room for "
        f"{_counted(room, 'worker')} of {listed(worker.bundle())} each in addition to itself"
    )


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _taken(group: Any) -> dict[int, dict[str, float]]:
    """Index of a bundle -> the resources of it that this program itself uses."""
    taken: dict[int, dict[str, float]] = {}
    pattern = re.compile(rf"(\w+)_group_(\d+)_{group.id.hex()}")
    # The public get_assigned_resources() does not say in which bundle they are.
    for name, parts in load_ray()._private.worker.global_worker.core_worker.resource_ids().items():
        if (found := pattern.fullmatch(name)) is not None:
            taken.setdefault(int(found[2]), {})[found[1]] = sum(amount for _, amount in parts)
    return taken
