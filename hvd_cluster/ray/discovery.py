"""Finds the Ray nodes that are available now, and how many workers fit on each."""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from hvd_cluster.launch.elastic.discovery import HostDiscovery
from hvd_cluster.launch.run_options import checked_arguments
from hvd_cluster.ray import nodes
from hvd_cluster.ray.resources import WorkerResources, bundles_of

logger = logging.getLogger(__name__)


class NodeDiscovery(HostDiscovery):
    """The nodes by their ids, which do not change when other nodes join.

    Resources that others use are not offered.

    Args:
        num_own: returns how many workers of this job are on a node.
    """

    def __init__(self, resources: WorkerResources, num_own: Callable[[str], int]) -> None:
        self._resources = resources
        self._num_own = num_own

    def find_available_hosts_and_slots(self) -> Mapping[str, int]:
        free = nodes.free_by_node()
        slots = {}
        for node in nodes.living():
            max_slots = self._resources.slots(node.resources)
            # Ray's count of free resources is a second late: never less than what the job already has there.
            slots[node.node_id] = min(
                max_slots, self._num_own(node.node_id) + self._resources.slots(free[node.node_id])
            )
        return {node: number for node, number in slots.items() if number}


class BundleDiscovery(HostDiscovery):
    """The nodes of a placement group by their ids, with the slots of its bundles.

    Args:
        num_own: returns how many workers of this job are in the bundle with that index.
    """

    def __init__(self, group: Any, resources: WorkerResources, num_own: Callable[[int], int]) -> None:
        self._group = group
        self._resources = resources
        self._num_own = num_own

    def find_available_hosts_and_slots(self) -> Mapping[str, int]:
        living = {node.node_id for node in nodes.living()}
        slots: Counter[str] = Counter()
        for bundle in bundles_of(self._group):
            if bundle.node_id in living:
                slots[bundle.node_id] += bundle.slots(self._resources, self._num_own(bundle.index))
        return {node: number for node, number in slots.items() if number}


def _first(*values: float | None) -> float:
    """The first of ``values`` that is not None."""
    return next(value for value in values if value is not None)


class RayHostDiscovery(HostDiscovery):
    """The nodes by their addresses, with all their resources, used or not.

    Args:
        use_gpu: whether each worker uses GPUs.
        cpus_per_slot: CPUs of each worker; ``cpus_per_worker`` is its other name.
        gpus_per_slot: GPUs of each worker, if it uses GPUs; ``gpus_per_worker`` is its other name.
    """

    def __init__(
        self,
        use_gpu: bool = False,
        cpus_per_slot: float = 1,
        gpus_per_slot: float = 1,
        cpus_per_worker: float | None = None,
        gpus_per_worker: float | None = None,
    ) -> None:
        self.use_gpu = use_gpu
        self.cpus_per_slot = _first(cpus_per_worker, cpus_per_slot, 1)
        self.gpus_per_slot = _first(gpus_per_worker, gpus_per_slot, 1)

    def find_available_hosts_and_slots(self) -> Mapping[str, int]:
        """Address -> number of workers that fit.

        Nodes that share an address are listed by their ids.
        """
        resources = WorkerResources(self.cpus_per_slot, self.gpus_per_slot if self.use_gpu else 0)
        living = nodes.living()
        shared = Counter(node.address for node in living)
        found = {
            node.address if shared[node.address] == 1 else node.node_id: resources.slots(node.resources)
            for node in living
        }
        return {host: slots for host, slots in found.items() if slots}


class TestDiscovery(RayHostDiscovery):
    """Simulates nodes that come and go, to test a training function with them.

    Args:
        min_hosts: the minimum number of nodes, if there are that many.
        max_hosts: the maximum number of nodes; None for all.
        change_frequency_s: seconds between two changes, of one node each.
        use_gpu, cpus_per_slot, gpus_per_slot: see :class:`RayHostDiscovery`.
        verbose: log each change as a warning instead of as information.
        seed: of the random choices.
    """

    __test__ = False  # pytest collects classes called Test...

    @checked_arguments
    def __init__(
        self,
        min_hosts: int,
        max_hosts: int | None,
        change_frequency_s: float,
        use_gpu: bool = False,
        cpus_per_slot: float = 1,
        gpus_per_slot: float = 1,
        verbose: bool = True,
        seed: int = 0,
        *,
        _graceful: bool = True,
    ) -> None:
        super().__init__(use_gpu, cpus_per_slot, gpus_per_slot)
        self._min_hosts = min_hosts
        self._max_hosts = max_hosts
        self._interval_s = change_frequency_s
        self._log_level = logging.WARNING if verbose else logging.INFO
        self._random = random.Random(seed)
        self._away: set[str] = set()
        self._change_at_s: float | None = None

    def find_available_hosts_and_slots(self) -> Mapping[str, int]:
        found = super().find_available_hosts_and_slots()
        now_s = time.monotonic()
        if self._change_at_s is None:
            limit = len(found) if self._max_hosts is None else self._max_hosts
            self._away = set(list(found)[limit:])
            self._change_at_s = now_s + self._interval_s
        elif now_s >= self._change_at_s:
            self._change_at_s = now_s + self._interval_s
            self._change(sorted(found))
        return {host: slots for host, slots in found.items() if host not in self._away}

    def _change(self, hosts: list[str]) -> None:
        away = [host for host in hosts if host in self._away]
        here = [host for host in hosts if host not in self._away]
        may_add = bool(away) and (self._max_hosts is None or len(here) < self._max_hosts)
        may_remove = len(here) > self._min_hosts
        if may_add and (not may_remove or self._random.random() < 0.5):
            host = self._random.choice(away)
            self._away.discard(host)
            logger.log(self._log_level, "test discovery: adding host %s", host)
        elif may_remove:
            host = self._random.choice(here)
            self._away.add(host)
            logger.log(self._log_level, "test discovery: removing host %s", host)
