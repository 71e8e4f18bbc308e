"""Another kind of cluster is one class: here hosts that are threads of the launcher, and processes as workers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import pytest

from hvd_cluster.errors import LaunchError
from hvd_cluster.launch.call import pack
from hvd_cluster.launch.elastic.discovery import FixedHosts
from hvd_cluster.launch.fleet import Fleet
from hvd_cluster.launch.hosts import Host
from hvd_cluster.launch.job import run_job
from hvd_cluster.launch.outcome import collect
from hvd_cluster.launch.placement import Placement
from hvd_cluster.launch.spec import ElasticSpec, JobSpec
from hvd_cluster.launch.task import Task, start_worker
from hvd_cluster.launch.worker_group import Callbacks, Worker
from hvd_cluster.rendezvous.secret import new_secret
from hvd_cluster.rendezvous.sockets import LOOPBACK, ReservedPort
from hvd_cluster.topology import Topology, join_address

HOSTS = (Host("pod-a", 1), Host("pod-b", 2))


class PodFleet(Fleet):
    """What a cluster must offer."""

    def __init__(self, *, without: str = "") -> None:
        super().__init__(new_secret())
        self._without = without
        self._master = self._stack.enter_context(ReservedPort(LOOPBACK))

    def add(self, host: Host) -> str:
        return "it is pending" if host.name == self._without else ""

    def host_key(self, name: str) -> str:
        return name

    def rendezvous(self, name: str) -> str:
        return join_address(LOOPBACK, self.server.port)

    def topology(self, placement: Placement, name: str, first: str, job_id: str, generation: int = 0) -> Topology:
        return placement.topology(
            rendezvous=self.rendezvous(name),
            secret=self.secret,
            master=join_address(LOOPBACK, self._master.port),
            job_id=job_id,
            generation=generation,
        )

    def start(
        self, name: str, task: Task, topology: Topology, env: Mapping[str, str | None], callbacks: Callbacks
    ) -> Worker:
        return start_worker(task, topology, {**env, "POD": name}, callbacks)


def place_and_sum() -> tuple[str, int, float]:
    import torch

    import hvd_cluster.torch as hvd

    hvd.init()
    total = hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
    return os.environ["POD"], hvd.local_rank(), total


def task() -> dict[str, Any]:
    return {"task": Task(call=pack(place_and_sum, (), {}), env={"HOROVOD_GLOO_IFACE": "lo"})}


@pytest.mark.processes
def test_a_job_of_fixed_size_runs_on_a_fleet_of_one_class() -> None:
    found = collect(run_job(JobSpec(num_proc=3, hosts=HOSTS, **task()), PodFleet(), Callbacks()))
    assert found == [("pod-a", 0, 3.0), ("pod-b", 0, 3.0), ("pod-b", 1, 3.0)]


@pytest.mark.slow
@pytest.mark.processes
def test_an_elastic_job_runs_on_it_too() -> None:
    spec = ElasticSpec(num_proc=3, min_num_proc=2, is_discovered=True, **task())
    found = collect(run_job(spec, PodFleet(), Callbacks(), discovery=FixedHosts(HOSTS)))
    assert sorted(found) == [("pod-a", 0, 3.0), ("pod-b", 0, 3.0), ("pod-b", 1, 3.0)]


def test_hosts_that_cannot_be_used_are_named() -> None:
    with pytest.raises(LaunchError, match="these hosts cannot be used:\n  pod-b: it is pending"):
        run_job(JobSpec(num_proc=3, hosts=HOSTS, **task()), PodFleet(without="pod-b"), Callbacks())
