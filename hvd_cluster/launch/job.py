"""Runs a job on one or more hosts."""

from __future__ import annotations

import functools
import logging
import uuid
from collections.abc import Callable

from hvd_cluster.launch.hosts import fill, is_local
from hvd_cluster.launch.outcome import Outcome
from hvd_cluster.launch.placement import place
from hvd_cluster.launch.spec import ElasticSpec, JobSpec
from hvd_cluster.launch.ssh.fleet import SshFleet
from hvd_cluster.launch.worker_group import FAILURE_GRACE_S, Callbacks, Worker, WorkerGroup
from hvd_cluster.rendezvous.secret import new_secret

logger = logging.getLogger(__name__)

#: Seconds that the other commands of a job get after one has failed.
COMMAND_GRACE_S = 1.0


def run_job(spec: JobSpec, callbacks: Callbacks, on_failure: Callable[[Outcome], None] | None = None) -> list[Outcome]:
    """Run the task on ``num_proc`` slots; the first failure ends all workers, unless the job is elastic.

    No process of the job remains on any host when this returns or raises, also after an interrupt.

    Returns:
        How each worker ended; in an elastic job, each member of the last world.

    Raises:
        ValueError: the hosts have too few slots.
        LaunchError: a host cannot be reached, a worker cannot be started, or the hosts of an elastic job cannot be
            discovered, were too few for too long, or changed too often.
    """
    if isinstance(spec, ElasticSpec):
        return _run_elastic(spec, callbacks)
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


def _run_elastic(spec: ElasticSpec, callbacks: Callbacks) -> list[Outcome]:
    from hvd_cluster.launch.elastic.controller import ElasticController
    from hvd_cluster.launch.elastic.discovery import FixedHosts, HostDiscoveryScript

    discovery = (
        HostDiscoveryScript(spec.discovery_script, spec.slots) if spec.discovery_script else FixedHosts(spec.hosts)
    )
    others = bool(spec.discovery_script) or not all(is_local(host.name) for host in spec.hosts)
    with SshFleet(new_secret(), spec.ssh, spec.interfaces, env=spec.task.env) as fleet:
        fleet.open(others=others)
        with ElasticController(spec, fleet, discovery, callbacks) as controller:
            return controller.run()
