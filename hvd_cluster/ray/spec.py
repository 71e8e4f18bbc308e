"""The checked arguments of a RayExecutor, and what follows from them.

That is the placement strategy, and how many workers fit.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hvd_cluster.errors import NotEnoughSlotsError
from hvd_cluster.launch.checks import (
    amount_problems,
    cooldown_problems,
    count_problems,
    flag_problems,
    num_proc_range_problems,
)
from hvd_cluster.ray import nodes
from hvd_cluster.ray.resources import WorkerResources, current_group, listed
from hvd_cluster.ray.session import connect
from hvd_cluster.ray.settings import ElasticSettings, MiniSettings
from hvd_cluster.ray.strategy import ColocatedStrategy, PGStrategy, Strategy

logger = logging.getLogger(__name__)

#: Arguments that have no effect in a job with a fixed number of workers, and their defaults.
_OF_ELASTIC_JOBS = {"reset_limit": None, "cooldown_range": None, "elastic_timeout": 600, "override_discovery": True}


@dataclass(frozen=True, kw_only=True)
class ExecutorSpec:
    """The arguments of a RayExecutor.

    :class:`hvd_cluster.ray.executor.RayExecutor` describes them.
    """

    settings: Any
    num_workers: int | None = None
    num_hosts: int | None = None
    num_workers_per_host: int = 1
    cpus_per_worker: float = 1
    use_gpu: bool = False
    gpus_per_worker: float | None = None
    use_current_placement_group: bool = True
    min_workers: int | None = None
    max_workers: int | None = None
    reset_limit: int | None = None
    cooldown_range: Sequence[float] | None = None
    elastic_timeout: float = 600
    override_discovery: bool = True

    def __post_init__(self) -> None:
        wrong = self._value_problems() or self._contradictions()
        wrong += resource_problems(self.cpus_per_worker, self.use_gpu, self.gpus_per_worker)
        if wrong:
            raise ValueError("; ".join(wrong))

    @property
    def resources(self) -> WorkerResources:
        """The resources of a worker."""
        return worker_resources(self.cpus_per_worker, self.use_gpu, self.gpus_per_worker)

    def strategy(self) -> Strategy:
        """The strategy of a job with a fixed number of workers.

        Asks Ray for the placement group of this program.
        """
        if self.num_hosts is not None:
            group = group_to_use(self.use_current_placement_group)
            return ColocatedStrategy(self.num_hosts, self.num_workers_per_host, self.resources, group)
        others = "num_workers; or num_hosts with num_workers_per_host; or, for an elastic job, min_workers"
        return packed_strategy(self.num_workers, self.resources, self.use_current_placement_group, others)

    def elastic_settings(self) -> ElasticSettings:
        """The settings of an elastic job."""
        assert self.min_workers is not None
        return ElasticSettings(
            nics=self.settings.nics,
            verbose=self.settings.verbose,
            timeout_s=self.settings.timeout_s,
            placement_group_timeout_s=self.settings.placement_group_timeout_s,
            min_num_proc=self.min_workers,
            max_num_proc=self.max_workers,
            reset_limit=self.reset_limit,
            cooldown_range=self.cooldown_range,
            elastic_timeout=self.elastic_timeout,
            discovery=None if self.override_discovery else getattr(self.settings, "discovery", None),
        )

    def _value_problems(self) -> list[str]:
        wrong = []
        if not isinstance(self.settings, MiniSettings):
            wrong.append(f"settings={self.settings!r} must be what create_settings() returns")
        names = ("num_workers", "num_hosts", "num_workers_per_host", "min_workers", "max_workers")
        wrong += [text for name in names for text in count_problems(name, getattr(self, name))]
        wrong += count_problems("reset_limit", self.reset_limit, 0)
        wrong += amount_problems("elastic_timeout", self.elastic_timeout, " of seconds")
        for name in ("use_current_placement_group", "override_discovery"):
            wrong += flag_problems(name, getattr(self, name))
        if not self.override_discovery and self.min_workers and getattr(self.settings, "discovery", None) is None:
            wrong.append(
                "override_discovery=False needs settings with a discovery: those of "
                "ElasticRayExecutor.create_settings(), with settings.discovery set"
            )
        return wrong + cooldown_problems("cooldown_range", self.cooldown_range)

    def _contradictions(self) -> list[str]:
        wrong = []
        least, most = self.min_workers, self.max_workers
        if most is not None and least is None:
            wrong.append("max_workers is set, but min_workers is not: an elastic job needs it, and it must be positive")
        if least is not None and (self.num_workers is not None or self.num_hosts is not None):
            other = "num_workers" if self.num_workers is not None else "num_hosts"
            wrong.append(
                f"Both `min_workers` and `{other}` provided. min_workers makes the job elastic: leave out num_workers "
                "and num_hosts"
            )
        if self.num_workers is not None and self.num_hosts is not None:
            wrong.append("num_workers and num_hosts exclude each other: give num_hosts with num_workers_per_host")
        if self.num_hosts is None and self.num_workers_per_host != 1:
            wrong.append(f"num_workers_per_host={self.num_workers_per_host} needs num_hosts too")
        if least is None:
            wrong += [
                f"{name}={getattr(self, name)!r} needs min_workers too: it only affects elastic jobs"
                for name, default in _OF_ELASTIC_JOBS.items()
                if getattr(self, name) != default
            ]
        return wrong + num_proc_range_problems(
            {"num_workers": None, "min_workers": least, "max_workers": most, "reset_limit": self.reset_limit}
        )


def packed_strategy(
    num_workers: int | None, resources: WorkerResources, use_current: bool, arguments: str
) -> PGStrategy:
    """Workers in the placement group that this program runs in, or in a new one.

    Args:
        arguments: which of the caller's arguments give the number of workers, for the error.

    Raises:
        ValueError: the number of workers is unknown.
    """
    group = group_to_use(use_current)
    if group is None and num_workers is None:
        raise ValueError(
            f"the number of workers is missing: pass {arguments}. (It may only be left out inside a placement group.)"
        )
    return PGStrategy(num_workers, resources, group)


def group_to_use(use_current: bool) -> Any:
    """The placement group that this program runs in, if it is wanted; else None."""
    connect()
    return current_group() if use_current else None


def worker_resources(cpus: float, use_gpu: bool, gpus: float | None) -> WorkerResources:
    """The resources of a worker, from checked arguments."""
    return WorkerResources(cpus, (1 if gpus is None else gpus) if use_gpu else 0)


def resource_problems(cpus: float, use_gpu: bool, gpus: float | None) -> list[str]:
    """Problems of the resources of a worker."""
    wrong = amount_problems("cpus_per_worker", cpus) + flag_problems("use_gpu", use_gpu)
    if gpus is not None and not use_gpu:
        wrong.append(f"gpus_per_worker={gpus!r} is set, but use_gpu is not: set use_gpu=True")
    elif gpus is not None:
        wrong += (bad := amount_problems("gpus_per_worker", gpus))
        if not bad and (gpus < 1 or gpus != int(gpus)):
            wrong.append(f"gpus_per_worker={gpus} must be a whole number >= 1: workers cannot share a GPU")
    return wrong


#: Resources are returned a little after their use, and Ray's count is a second late: it must be stable for this long.
_STABLE_S = 2.0
#: Other programs may start and end all the time: after this many seconds the present count is used.
_MAX_WAIT_S = 15.0
_POLL_S = 0.1


def num_workers_that_fit(
    cpus_per_worker: float = 1,
    use_gpu: bool = False,
    gpus_per_worker: float | None = None,
    use_current_placement_group: bool = True,
) -> int:
    """How many workers fit now, in the program's placement group or the cluster.

    It returns at once if the whole cluster is free; otherwise it takes a few seconds, since another job may just have
    ended.

    Raises:
        NotEnoughSlotsError: no worker fits.
    """
    resources = worker_resources(cpus_per_worker, use_gpu, gpus_per_worker)
    group = group_to_use(use_current_placement_group)
    count = PGStrategy(None, resources, group).num_workers if group is not None else _settled_capacity(resources)
    if not count:
        raise NotEnoughSlotsError(
            f"no node has {listed(resources.bundle())} free for a worker: end what else runs there, or give num_proc "
            "to wait for room"
        )
    return count


def require_capacity(
    num_workers: int,
    cpus_per_worker: float = 1,
    use_gpu: bool = False,
    gpus_per_worker: float | None = None,
    use_current_placement_group: bool = True,
) -> None:
    """Check that the workers can ever fit into the program's placement group.

    A cluster may grow, but that group does not.

    Raises:
        NotEnoughSlotsError: that group is too small.
    """
    resources = worker_resources(cpus_per_worker, use_gpu, gpus_per_worker)
    group = group_to_use(use_current_placement_group)
    PGStrategy(num_workers, resources, group).check()
    maximum = _maximum(resources)
    if group is None and resources.bundle() and maximum < num_workers:
        logger.warning(
            "%d workers of %s each are needed, and the whole cluster has room for %d: unless it grows, the job fails",
            num_workers,
            listed(resources.bundle()),
            maximum,
        )


def _settled_capacity(resources: WorkerResources) -> int:
    """How many workers fit into the cluster once ended jobs have left it."""
    now_s = time.monotonic()
    deadline_s, still_until_s, room = now_s + _MAX_WAIT_S, now_s + _STABLE_S, _capacity(resources)
    maximum = _maximum(resources)
    while room < maximum and time.monotonic() < min(still_until_s, deadline_s):
        time.sleep(_POLL_S)
        before, room = room, _capacity(resources)
        if room != before:
            still_until_s = time.monotonic() + _STABLE_S
    return room


def _maximum(resources: WorkerResources) -> int:
    """How many workers would fit into the cluster if nothing else ran there."""
    return sum(resources.slots(node.resources) for node in nodes.living())


def _capacity(resources: WorkerResources) -> int:
    return sum(resources.slots(free) for free in nodes.free_by_node().values())
