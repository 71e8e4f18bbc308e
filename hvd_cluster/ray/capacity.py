"""How many workers find room now, and do so many ever?"""

from __future__ import annotations

import time

from hvd_cluster.errors import NotEnoughSlotsError
from hvd_cluster.ray import nodes
from hvd_cluster.ray.resources import WorkerResources, listed
from hvd_cluster.ray.spec import group_to_use, worker_resources
from hvd_cluster.ray.strategy import PGStrategy

#: What has ended is given back a little later, and Ray's count lags a second behind: so long it must have stood still.
_STILL_S = 2.0
#: Others may come and go all the time: after so many seconds what is there counts.
_LONGEST_S = 15.0
_POLL_S = 0.1


def num_workers_that_fit(
    cpus_per_worker: float = 1,
    use_gpu: bool = False,
    gpus_per_worker: float | None = None,
    use_current_placement_group: bool = True,
) -> int:
    """Workers for which there is room now: in the placement group that the program is in, or else in the cluster.

    Where all of the cluster is free it takes no time; else a few seconds, since what ran before may just have ended.

    Raises:
        NotEnoughSlotsError: there is room for none.
    """
    resources = worker_resources(cpus_per_worker, use_gpu, gpus_per_worker)
    group = group_to_use(use_current_placement_group)
    room = PGStrategy(None, resources, group).num_workers if group is not None else _settled_capacity(resources)
    if not room:
        raise NotEnoughSlotsError(
            f"no node has {listed(resources.bundle())} free for a worker: end what else runs there, or give num_proc "
            "to wait for room"
        )
    return room


def require_capacity(
    num_workers: int,
    cpus_per_worker: float = 1,
    use_gpu: bool = False,
    gpus_per_worker: float | None = None,
    use_current_placement_group: bool = True,
) -> None:
    """Raise where there will never be room: a cluster may grow, the placement group of the program does not.

    Raises:
        NotEnoughSlotsError: that group is too small.
    """
    resources = worker_resources(cpus_per_worker, use_gpu, gpus_per_worker)
    PGStrategy(num_workers, resources, group_to_use(use_current_placement_group)).check()


def _settled_capacity(resources: WorkerResources) -> int:
    """Workers for which the cluster has room once what has ended is given back."""
    now_s = time.monotonic()
    deadline_s, still_until_s, room = now_s + _LONGEST_S, now_s + _STILL_S, _capacity(resources)
    most = sum(resources.slots(node.resources) for node in nodes.living())
    while room < most and time.monotonic() < min(still_until_s, deadline_s):
        time.sleep(_POLL_S)
        before, room = room, _capacity(resources)
        if room != before:
            still_until_s = time.monotonic() + _STILL_S
    return room


def _capacity(resources: WorkerResources) -> int:
    return sum(resources.slots(free) for free in nodes.free_by_node().values())
