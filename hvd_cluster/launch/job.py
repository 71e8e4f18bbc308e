"""Runs a job on one or more hosts."""

from __future__ import annotations

import functools
import logging
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING

from hvd_cluster.launch.fleet import Fleet
from hvd_cluster.launch.hosts import fill, is_local
from hvd_cluster.launch.outcome import Outcome
from hvd_cluster.launch.placement import Slot, place
from hvd_cluster.launch.spec import ElasticSpec, JobSpec
from hvd_cluster.launch.worker_group import FAILURE_GRACE_S, Callbacks, Worker, WorkerGroup

if TYPE_CHECKING:
    from hvd_cluster.launch.elastic.discovery import HostDiscovery

logger = logging.getLogger(__name__)

#: Seconds that the other commands of a job get after one has failed.
COMMAND_GRACE_S = 1.0


def run_job(
    spec: JobSpec,
    fleet: Fleet,
    callbacks: Callbacks,
    on_failure: Callable[[Outcome], None] | None = None,
    discovery: HostDiscovery | None = None,
) -> list[Outcome]:
    """Run the task on ``num_proc`` slots.

    The first failure ends all workers, unless the job is elastic. The fleet is closed, and no process of the job
    remains on any host, when this returns or raises, also after an interrupt.

    Args:
        spec: what to run.
        fleet: the hosts, none of which is connected yet.
        callbacks: what to do with the workers' output and reports.
        on_failure: called with the first failure before the others are stopped, in a job of fixed size.
        discovery: finds the hosts of an elastic job, if neither ``spec.hosts`` nor ``spec.discovery_script`` does.

    Returns:
        How each worker ended; in an elastic job, each member of the last world.

    Raises:
        ValueError: the hosts have too few slots.
        LaunchError: a host cannot be reached, a worker cannot be started, or the hosts of an elastic job cannot be
            discovered, were too few for too long, or changed too often.
    """
    with fleet:
        if isinstance(spec, ElasticSpec):
            return _run_elastic(spec, fleet, callbacks, discovery)
        return _run_fixed(spec, fleet, callbacks, on_failure)


def _run_fixed(
    spec: JobSpec, fleet: Fleet, callbacks: Callbacks, on_failure: Callable[[Outcome], None] | None
) -> list[Outcome]:
    hosts = fill(spec.hosts, spec.num_proc)
    job_id = uuid.uuid4().hex[:12]
    # Commands report only an exit code: the others get time to fail of the same mistake and show it.
    grace_s = COMMAND_GRACE_S if spec.task.command is not None else FAILURE_GRACE_S
    group = WorkerGroup[Worker](failure_grace_s=grace_s, on_failure=on_failure)
    fleet.connect(hosts)
    names = [host.name for host in hosts for _ in range(host.slots)]
    placements = place([Slot(i, fleet.host_key(name), fleet.address(name)) for i, name in enumerate(names)])
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


def _run_elastic(
    spec: ElasticSpec, fleet: Fleet, callbacks: Callbacks, discovery: HostDiscovery | None
) -> list[Outcome]:
    from hvd_cluster.launch.elastic.controller import ElasticController
    from hvd_cluster.launch.elastic.discovery import FixedHosts, HostDiscoveryScript

    others = spec.may_come or not all(is_local(host.name) for host in spec.hosts)
    if discovery is None:
        script = spec.discovery_script
        discovery = HostDiscoveryScript(script, spec.slots) if script else FixedHosts(spec.hosts)
    fleet.open(others=others)
    with ElasticController(spec, fleet, discovery, callbacks) as controller:
        return controller.run()
