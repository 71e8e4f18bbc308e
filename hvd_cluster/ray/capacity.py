"""How many workers fit now, and whether a number of workers can ever fit."""

from __future__ import annotations

import time

from hvd_cluster.errors import NotEnoughSlotsError
from hvd_cluster.ray import nodes
from hvd_cluster.ray.resources import WorkerResources, listed
from hvd_cluster.ray.spec import group_to_use, worker_resources
from hvd_cluster.ray.strategy import PGStrategy

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
    """How many workers fit now, in the placement group that the program runs in, or else in the cluster.

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
    """Check that the workers can ever fit: a cluster may grow, but the placement group of the program does not.

    Raises:
        NotEnoughSlotsError: that group is too small.
    """
    resources = worker_resources(cpus_per_worker, use_gpu, gpus_per_worker)
    PGStrategy(num_workers, resources, group_to_use(use_current_placement_group)).check()


def _settled_capacity(resources: WorkerResources) -> int:
    """How many workers fit into the cluster once the resources of ended jobs are returned."""
    now_s = time.monotonic()
    deadline_s, still_until_s, room = now_s + _MAX_WAIT_S, now_s + _STABLE_S, _capacity(resources)
    maximum = sum(resources.slots(node.resources) for node in nodes.living())
    while room < maximum and time.monotonic() < min(still_until_s, deadline_s):
        time.sleep(_POLL_S)
        before, room = room, _capacity(resources)
        if room != before:
            still_until_s = time.monotonic() + _STABLE_S
    return room


def _capacity(resources: WorkerResources) -> int:
    return sum(resources.slots(free) for free in nodes.free_by_node().values())
