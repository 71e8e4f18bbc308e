"""The resources of one worker on a Ray node. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


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
        """How many workers fit into ``resources``; the number of CPUs if a worker needs nothing."""
        counts = [resources.get(name, 0) / amount for name, amount in self.bundle().items()]
        return math.floor(min(counts, default=math.ceil(resources.get("CPU", 0))) + 1e-9)


def device_env(gpus: Sequence[str]) -> dict[str, str]:
    """Variables that make only these GPUs visible to a worker; Ray hides none from a worker without GPUs."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}


def number(amount: float) -> str:
    """ "3" or "0.5"."""
    return f"{amount:g}"


def listed(resources: Mapping[str, float]) -> str:
    """ "1 CPU and 2 GPUs"."""
    parts = [f"{number(amount)} {name}{'' if amount == 1 else 's'}" for name, amount in resources.items()]
    return " and ".join(parts) or "nothing"


def shortage(needed: Mapping[str, float], total: Mapping[str, float], free: Mapping[str, float]) -> str:
    """What a cluster lacks: "needs 8 GPUs; the cluster has 4, 2 free", a clause for each missing resource.

    Empty if all resources are there and free: then they do not fit together on the nodes.
    """
    parts = [
        f"needs {number(amount)} {name}{'' if amount == 1 else 's'}; the cluster has {number(total.get(name, 0))}, "
        f"{number(free.get(name, 0))} free"
        for name, amount in needed.items()
        if amount > free.get(name, 0)
    ]
    return ", and ".join(parts)
