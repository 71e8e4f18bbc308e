"""Runs a job with a fixed number of workers, on one or more hosts; the first failure ends all workers."""

from __future__ import annotations

import functools
import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from hvd_cluster.launch.hosts import Host, fill
from hvd_cluster.launch.outcome import Outcome
from hvd_cluster.launch.placement import place
from hvd_cluster.launch.ssh.fleet import SshFleet
from hvd_cluster.launch.ssh.options import SshOptions
from hvd_cluster.launch.task import Task
from hvd_cluster.launch.worker_group import FAILURE_GRACE_S, Callbacks, Worker, WorkerGroup
from hvd_cluster.rendezvous.secret import new_secret

logger = logging.getLogger(__name__)

#: Seconds that the other commands of a job get after one has failed.
COMMAND_GRACE_S = 1.0


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """What to run where."""

    task: Task
    #: Hosts with enough slots for ``num_proc`` workers.
    hosts: tuple[Host, ...]
    num_proc: int
    ssh: SshOptions = field(default_factory=SshOptions)
    #: Names of the network interfaces to use; if empty, a probe decides.
    interfaces: tuple[str, ...] = ()
    #: Seconds for workers that run a function to report; a command does not report.
    start_timeout_s: float = 30.0


def run_job(spec: JobSpec, callbacks: Callbacks, on_failure: Callable[[Outcome], None] | None = None) -> list[Outcome]:
    """Run the task once on each of the first ``num_proc`` slots.

    No process of the job remains on any host when this returns or raises, also after an interrupt.

    Returns:
        How each worker ended.

    Raises:
        ValueError: the hosts have too few slots.
        LaunchError: a host cannot be reached, or a worker cannot be started.
    """
    hosts = fill(spec.hosts, spec.num_proc)
    job_id = uuid.uuid4().hex[:12]
    # Commands report only an exit code: the others get time to fail of the same mistake and show it.
    grace_s = COMMAND_GRACE_S if spec.task.command is not None else FAILURE_GRACE_S
    group = WorkerGroup[Worker](failure_grace_s=grace_s, on_failure=on_failure)
    with SshFleet(new_secret(), spec.ssh, spec.interfaces, env=spec.task.env) as fleet:
        fleet.connect(hosts)
        names = fleet.names(hosts)
        placements = place(fleet.slots(hosts))
        first = names[placements[0].slot.index]
        logger.info("job %s: starting %d workers on %s", job_id, spec.num_proc, ", ".join(host.name for host in hosts))
        try:
            starters = [
                functools.partial(
                    fleet.start, name, spec.task, fleet.topology(placement, name, first, job_id), placement.device_env()
                )
                for placement in placements
                for name in (names[placement.slot.index],)
            ]
            group.start(starters, callbacks)
            if spec.task.call is not None:
                group.wait_ready(spec.start_timeout_s)
            return group.ends()
        finally:
            group.stop()


def on_this_host(num_proc: int) -> tuple[Host, ...]:
    """This host with ``num_proc`` slots."""
    return (Host("localhost", num_proc),)
