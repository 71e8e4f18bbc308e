"""Where the workers' resources come from: a placement group of their own, or the one that the program is in."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hvd_cluster.errors import NotEnoughSlotsError, StartTimeoutError
from hvd_cluster.ray import nodes
from hvd_cluster.ray.bundles import bundles_of, described, in_bundle
from hvd_cluster.ray.resources import WorkerResources, listed, shortage
from hvd_cluster.ray.session import load_ray

logger = logging.getLogger(__name__)

#: Seconds after which a placement group that is not there yet is worth a word; then again at ten times that interval.
_EXPLAIN_S = 5.0
_LOOK_S = 0.5


@dataclass(frozen=True)
class Reservation:
    """Room for the workers."""

    group: Any
    #: For each worker its bundle in the group.
    bundles: tuple[int, ...]
    resources: WorkerResources
    #: Ours to remove.
    is_own: bool

    def options(self, worker: int) -> dict[str, Any]:
        """The options of that worker's actor."""
        place = in_bundle(self.group, self.bundles[worker])
        return {"num_cpus": self.resources.cpus, "num_gpus": self.resources.gpus, **place}

    def release(self) -> None:
        """Give the resources back; a group that is not ours stays."""
        if self.is_own:
            load_ray().util.remove_placement_group(self.group)


class Strategy(ABC):
    """How many workers, and where."""

    resources: WorkerResources

    @property
    @abstractmethod
    def num_workers(self) -> int:
        """How many workers there will be."""

    @abstractmethod
    def reserve(self, timeout_s: float) -> Reservation:
        """Room for all workers.

        Raises:
            StartTimeoutError: the cluster has none within ``timeout_s`` seconds; the text says what is missing.
            NotEnoughSlotsError: the placement group that the program is in is too small.
        """


class PGStrategy(Strategy):
    """Workers packed onto as few nodes as possible, or in a placement group that is there already.

    Args:
        num_workers: how many; with ``placement_group`` None stands for as many as it has room for.
        resources: what each takes.
        placement_group: the one to use, which this program is in; None makes one.
    """

    def __init__(self, num_workers: int | None, resources: WorkerResources, placement_group: Any = None) -> None:
        self.resources = resources
        self._group = placement_group
        self._num_workers = num_workers

    @property
    def num_workers(self) -> int:
        return len(self._bundles()) if self._num_workers is None else self._num_workers

    def reserve(self, timeout_s: float) -> Reservation:
        if self._group is None:
            group, _ = create_placement_group(self.resources.bundle(), self.num_workers, timeout_s, "PACK")
            return Reservation(group, tuple(range(self.num_workers)), self.resources, is_own=True)
        bundles = self._bundles()[: self._num_workers]
        if not bundles or len(bundles) < (self._num_workers or 0):
            raise too_small(self._group, self.resources, f"{self._num_workers or 'some'} are needed")
        return Reservation(self._group, tuple(bundles), self.resources, is_own=False)

    def _bundles(self) -> list[int]:
        """A bundle for each worker that finds room in the group beside the program itself.

        Those come last that others use now, such as another executor. (Older releases of Ray, told to put a worker into
        any bundle, would put it into one that has no room for it.)
        """
        unused: list[int] = []
        used: list[int] = []
        for bundle in bundles_of(self._group):
            num_unused = bundle.slots(self.resources)
            unused += [bundle.index] * num_unused
            used += [bundle.index] * (self.resources.slots(bundle.resources) - num_unused)
        return unused + used


class ColocatedStrategy(Strategy):
    """Equally many workers on each of several nodes.

    Args:
        num_hosts: how many nodes.
        num_workers_per_host: how many workers on each.
        resources: what each worker takes.
        placement_group: the one to use, which this program is in; None makes one.
    """

    def __init__(
        self, num_hosts: int, num_workers_per_host: int, resources: WorkerResources, placement_group: Any = None
    ) -> None:
        self.resources = resources
        self._num_hosts = num_hosts
        self._per_host = num_workers_per_host
        self._group = placement_group

    @property
    def num_workers(self) -> int:
        return self._num_hosts * self._per_host

    def reserve(self, timeout_s: float) -> Reservation:
        if self._group is not None:
            return Reservation(self._group, self._bundles(), self.resources, is_own=False)
        bundle = self.resources.bundle(self._per_host)
        group, _ = create_placement_group(bundle, self._num_hosts, timeout_s, "STRICT_SPREAD")
        bundles = tuple(host for host in range(self._num_hosts) for _ in range(self._per_host))
        return Reservation(group, bundles, self.resources, is_own=True)

    def _bundles(self) -> tuple[int, ...]:
        """For each worker its bundle in the group: the first nodes that have room for all of theirs."""
        seats: dict[str, list[int]] = {}  # node -> the bundle of each place there
        for bundle in bundles_of(self._group):
            if bundle.node_id:
                seats.setdefault(bundle.node_id, []).extend([bundle.index] * self.resources.slots(bundle.resources))
        fit = [on_node[: self._per_host] for on_node in seats.values() if len(on_node) >= self._per_host]
        if len(fit) < self._num_hosts:
            raise too_small(
                self._group,
                self.resources,
                f"{self._per_host} on each of {self._num_hosts} nodes are needed, and {len(fit)} of its nodes have "
                "room for that many",
            )
        return tuple(index for on_node in fit[: self._num_hosts] for index in on_node)


def too_small(group: Any, resources: WorkerResources, needed: str) -> NotEnoughSlotsError:
    """The error of a program whose placement group has no room for the workers."""
    return NotEnoughSlotsError(
        f"{described(group, resources)}, but {needed}. Give it more bundles, or pass use_current_placement_group=False."
    )


def create_placement_group(
    resources_per_bundle: Mapping[str, float],
    num_bundles: int,
    pg_timeout: float,
    pg_strategy: str,
) -> tuple[Any, list[dict[str, float]]]:
    """A placement group that is ready to use.

    Args:
        resources_per_bundle: such as ``{"CPU": 1, "GPU": 1}``.
        num_bundles: how many bundles.
        pg_timeout: seconds to wait for them.
        pg_strategy: "PACK", "SPREAD", "STRICT_PACK" or "STRICT_SPREAD".

    Returns:
        The group and its bundles.

    Raises:
        StartTimeoutError: it is not ready in time, and is removed; a ``TimeoutError``.
    """
    ray = load_ray()
    # Ray wants a resource in each bundle; workers that take none count as nothing.
    bundle = dict(resources_per_bundle) or {"CPU": 0.001}
    group = ray.util.placement_group([bundle] * num_bundles, strategy=pg_strategy)
    try:
        _await(group, bundle, num_bundles, pg_timeout, pg_strategy)
    except BaseException:  # an interrupt as well: a group that nobody holds would keep its resources
        ray.util.remove_placement_group(group)
        raise
    return group, list(group.bundle_specs)


def _await(group: Any, bundle: Mapping[str, float], num_bundles: int, timeout_s: float, strategy: str) -> None:
    deadline_s, explain_s = time.monotonic() + timeout_s, time.monotonic() + _EXPLAIN_S
    while not group.wait(min(_LOOK_S, max(0.0, deadline_s - time.monotonic()))):
        now_s = time.monotonic()
        if now_s >= deadline_s:
            raise StartTimeoutError(
                "Placement group creation timed out. Make sure your cluster either has enough resources or use an "
                f"autoscaling cluster. After {timeout_s:g} s: {missing(bundle, num_bundles, strategy)}. "
                "create_settings(placement_group_timeout_s=...) says how long to wait."
            )
        if now_s >= explain_s:
            explain_s = now_s + 10 * _EXPLAIN_S
            logger.warning("waiting for a placement group: %s", missing(bundle, num_bundles, strategy))


def missing(bundle: Mapping[str, float], num_bundles: int, strategy: str) -> str:
    """What the cluster lacks for that many bundles, in words."""
    ray = load_ray()
    needed = {name: amount * num_bundles for name, amount in bundle.items()}
    short = shortage(needed, ray.cluster_resources(), ray.available_resources())
    if short:
        return f"the job {short}"
    hosts = [node for node in nodes.living() if _holds(node.resources, bundle)]
    if strategy == "STRICT_SPREAD" and len(hosts) < num_bundles:
        return (
            f"the job needs {num_bundles} nodes with {listed(bundle)} each; the cluster has {len(hosts)} such nodes "
            f"among {len(nodes.living())}"
        )
    where = "on nodes of their own" if strategy == "STRICT_SPREAD" else "each on one node"
    return f"the job needs {num_bundles} times {listed(bundle)} {where}; that much is free, but not together"


def _holds(resources: Mapping[str, float], bundle: Mapping[str, float]) -> bool:
    return all(resources.get(name, 0) >= amount for name, amount in bundle.items())
