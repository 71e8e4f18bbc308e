"""Where the workers' resources come from: a new or present placement group."""

from __future__ import annotations

import contextlib
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hvd_cluster.errors import NotEnoughSlotsError, StartTimeoutError
from hvd_cluster.ray import nodes
from hvd_cluster.ray.resources import Bundle, WorkerResources, bundles_of, described, in_bundle, listed, shortage
from hvd_cluster.ray.session import Connection, ConnectionEndedError, load_ray

logger = logging.getLogger(__name__)

#: Seconds after which the wait for a placement group is logged; then again at ten times that interval.
_EXPLAIN_S = 5.0
_POLL_S = 0.5


@dataclass(frozen=True)
class Reservation:
    """Reserved resources for the workers."""

    group: Any
    #: For each worker its bundle in the group.
    bundles: tuple[int, ...]
    resources: WorkerResources
    #: Whether this executor created the group and must remove it.
    is_own: bool
    #: The connection in which the group exists.
    connection: Connection = field(default_factory=Connection.current)

    def options(self, worker: int) -> dict[str, Any]:
        """The options of that worker's actor."""
        options = in_bundle(self.group, self.bundles[worker])
        return {"num_cpus": self.resources.cpus, "num_gpus": self.resources.gpus, **options}

    def release(self) -> None:
        """Return the resources; a group that others created remains."""
        if self.is_own:
            _remove(self.group, self.connection)


def _remove(group: Any, connection: Connection) -> None:
    """Remove a placement group; if its connection has ended, it is already gone."""
    with contextlib.suppress(ConnectionEndedError):
        connection.ray().util.remove_placement_group(group)


class Strategy(ABC):
    """How many workers, and where.

    Args:
        resources: the resources of each.
        placement_group: the group to use, in which this program runs; None creates one.
    """

    def __init__(self, resources: WorkerResources, placement_group: Any = None) -> None:
        self.resources = resources
        self._group = placement_group

    @property
    @abstractmethod
    def num_workers(self) -> int:
        """The number of workers."""

    def reserve(self, timeout_s: float) -> Reservation:
        """Reserve resources for all workers.

        Raises:
            StartTimeoutError: there are none within ``timeout_s`` seconds; the message says what is missing.
            NotEnoughSlotsError: the placement group that the program runs in is too small.
        """
        if self._group is None:
            return self._make_group(timeout_s)
        deadline_s = time.monotonic() + timeout_s
        while not (bundles := self._bundles(lambda bundle: bundle.slots(self.resources))):
            self.check()
            if time.monotonic() > deadline_s:
                raise in_use(self._group, self.resources, self._needed(), timeout_s)
            time.sleep(_POLL_S)
        return Reservation(self._group, bundles, self.resources, is_own=False)

    def check(self) -> None:
        """Raise if there will never be room, whatever else uses it now.

        Raises:
            NotEnoughSlotsError: the placement group that the program runs in is too small.
        """
        if self._group is not None and not self._bundles(lambda bundle: self.resources.slots(bundle.resources)):
            raise too_small(self._group, self.resources, self._needed())

    @abstractmethod
    def _make_group(self, timeout_s: float) -> Reservation:
        """Reserve resources in a new placement group."""

    @abstractmethod
    def _bundles(self, room: Callable[[Bundle], int]) -> tuple[int, ...]:
        """For each worker its bundle in the group; empty if there are too few.

        The bundles are chosen here because older versions of Ray may choose one without room.

        Args:
            room: returns how many workers a bundle has room for.
        """

    @abstractmethod
    def _needed(self) -> str:
        """What the workers need, as the end of a sentence about what the group has."""


class PGStrategy(Strategy):
    """Workers packed onto few nodes, or in a placement group that exists.

    Args:
        num_workers: how many; with ``placement_group`` None means as many as fit.
    """

    def __init__(self, num_workers: int | None, resources: WorkerResources, placement_group: Any = None) -> None:
        super().__init__(resources, placement_group)
        self._num_workers = num_workers

    @property
    def num_workers(self) -> int:
        if self._num_workers is not None:
            return self._num_workers
        return sum(self.resources.slots(bundle.resources) for bundle in bundles_of(self._group))

    def _make_group(self, timeout_s: float) -> Reservation:
        group, _ = create_placement_group(self.resources.bundle(), self.num_workers, timeout_s, "PACK")
        return Reservation(group, tuple(range(self.num_workers)), self.resources, is_own=True)

    def _bundles(self, room: Callable[[Bundle], int]) -> tuple[int, ...]:
        slots = tuple(bundle.index for bundle in bundles_of(self._group) for _ in range(room(bundle)))
        return slots[: self.num_workers] if len(slots) >= self.num_workers else ()

    def _needed(self) -> str:
        return f"{self._num_workers or 'some'} {'is' if self._num_workers == 1 else 'are'} needed"


class ColocatedStrategy(Strategy):
    """The same number of workers on each of several nodes."""

    def __init__(
        self, num_hosts: int, num_workers_per_host: int, resources: WorkerResources, placement_group: Any = None
    ) -> None:
        super().__init__(resources, placement_group)
        self._num_hosts = num_hosts
        self._per_host = num_workers_per_host

    @property
    def num_workers(self) -> int:
        return self._num_hosts * self._per_host

    def _make_group(self, timeout_s: float) -> Reservation:
        bundle = self.resources.bundle(self._per_host)
        group, _ = create_placement_group(bundle, self._num_hosts, timeout_s, "STRICT_SPREAD")
        bundles = tuple(host for host in range(self._num_hosts) for _ in range(self._per_host))
        return Reservation(group, bundles, self.resources, is_own=True)

    def _bundles(self, room: Callable[[Bundle], int]) -> tuple[int, ...]:
        fit = self._fit(room)
        return (
            tuple(index for on_node in fit[: self._num_hosts] for index in on_node)
            if len(fit) >= self._num_hosts
            else ()
        )

    def _fit(self, room: Callable[[Bundle], int]) -> list[list[int]]:
        """The nodes with room for all of their workers.

        For each node, the bundle of each worker.
        """
        slots: dict[str, list[int]] = {}
        for bundle in bundles_of(self._group):
            if bundle.node_id:
                slots.setdefault(bundle.node_id, []).extend([bundle.index] * room(bundle))
        return [on_node[: self._per_host] for on_node in slots.values() if len(on_node) >= self._per_host]

    def _needed(self) -> str:
        fit = self._fit(lambda bundle: self.resources.slots(bundle.resources))
        return (
            f"{self._per_host} on each of {self._num_hosts} nodes are needed, and {len(fit)} of its nodes have "
            "room for that many"
        )


def too_small(group: Any, resources: WorkerResources, needed: str) -> NotEnoughSlotsError:
    """The error if the program's placement group has no room for the workers."""
    return NotEnoughSlotsError(
        f"{described(group, resources)}, but {needed}. Give it more bundles (a trial of Ray Tune: with "
        "tune.with_resources), or pass use_current_placement_group=False."
    )


def in_use(group: Any, resources: WorkerResources, needed: str, timeout_s: float) -> StartTimeoutError:
    """The error if others, such as an executor, use the program's placement group."""
    free = sum(bundle.slots(resources) for bundle in bundles_of(group))
    return StartTimeoutError(
        f"{described(group, resources)}. Others use it: there is room for {free} after {timeout_s:g} s, but {needed}. "
        "End what else runs there, give it more bundles, or pass use_current_placement_group=False; "
        "create_settings(placement_group_timeout_s=...), or placement_group_timeout of ray.run, sets how long to wait."
    )


def create_placement_group(
    resources_per_bundle: Mapping[str, float],
    num_bundles: int,
    pg_timeout: float,
    pg_strategy: str,
) -> tuple[Any, list[dict[str, float]]]:
    """Create a placement group and wait until it is ready.

    Args:
        resources_per_bundle: such as ``{"CPU": 1, "GPU": 1}``.
        num_bundles: the number of bundles.
        pg_timeout: seconds to wait for them.
        pg_strategy: "PACK", "SPREAD", "STRICT_PACK" or "STRICT_SPREAD".

    Returns:
        The group and its bundles.

    Raises:
        StartTimeoutError: it is not ready in time, and is removed; a ``TimeoutError``.
    """
    ray, connection = load_ray(), Connection.current()
    # Ray requires a resource in each bundle; workers may need none.
    bundle = dict(resources_per_bundle) or {"CPU": 0.001}
    group = ray.util.placement_group([bundle] * num_bundles, strategy=pg_strategy)
    try:
        _await(group, bundle, num_bundles, pg_timeout, pg_strategy)
    except BaseException:  # also after an interrupt: an abandoned group would keep its resources
        _remove(group, connection)
        raise
    return group, list(group.bundle_specs)


def _await(group: Any, bundle: Mapping[str, float], num_bundles: int, timeout_s: float, strategy: str) -> None:
    deadline_s, explain_s = time.monotonic() + timeout_s, time.monotonic() + _EXPLAIN_S
    while not group.wait(min(_POLL_S, max(0.0, deadline_s - time.monotonic()))):
        now_s = time.monotonic()
        if now_s >= deadline_s:
            raise StartTimeoutError(
                "Placement group creation timed out. Make sure your cluster either has enough resources or use an "
                f"autoscaling cluster. After {timeout_s:g} s: {missing(bundle, num_bundles, strategy)}. "
                "Ask for fewer workers or less for each, end what else runs there, or add nodes; "
                "create_settings(placement_group_timeout_s=...), or placement_group_timeout of ray.run, sets how long "
                "to wait for them."
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
