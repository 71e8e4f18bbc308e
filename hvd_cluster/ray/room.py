"""How many workers find room now, and do so many ever?"""

from __future__ import annotations

from hvd_cluster.errors import NotEnoughSlotsError
from hvd_cluster.ray import nodes
from hvd_cluster.ray.resources import listed
from hvd_cluster.ray.spec import group_to_use, worker_resources
from hvd_cluster.ray.strategy import PGStrategy


def num_workers_that_fit(
    cpus_per_worker: float = 1,
    use_gpu: bool = False,
    gpus_per_worker: float | None = None,
    use_current_placement_group: bool = True,
) -> int:
    """Workers for which there is room now: in the placement group that the program is in, or else in the cluster.

    Raises:
        NotEnoughSlotsError: there is room for none.
    """
    resources = worker_resources(cpus_per_worker, use_gpu, gpus_per_worker)
    group = group_to_use(use_current_placement_group)
    if group is not None:
        room = PGStrategy(None, resources, group).num_workers
    else:
        room = sum(resources.slots(free) for free in nodes.free_by_node().values())
    if not room:
        raise NotEnoughSlotsError(
            f"no node has {listed(resources.bundle())} free for a worker: end what else runs there, or give num_proc "
            "to wait for room"
        )
    return room


def require_room(
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
