"""Runs an elastic job from start to end."""

from __future__ import annotations

from hvd_cluster.launch.elastic.controller import ElasticController
from hvd_cluster.launch.elastic.discovery import FixedHosts, HostDiscovery, HostDiscoveryScript
from hvd_cluster.launch.elastic.spec import ElasticSpec
from hvd_cluster.launch.hosts import is_local
from hvd_cluster.launch.outcome import Outcome
from hvd_cluster.launch.ssh.fleet import SshFleet
from hvd_cluster.launch.worker_group import Callbacks
from hvd_cluster.rendezvous.secret import new_secret


def run_elastic(spec: ElasticSpec, callbacks: Callbacks) -> list[Outcome]:
    """Run the task on ``min_num_proc`` to ``max_num_proc`` workers until they have finished.

    No process of the job remains on any host when this returns or raises, also after an interrupt.

    Returns:
        The outcomes of the last world's members.

    Raises:
        LaunchError: the hosts cannot be discovered, were too few for too long, or changed too often.
    """
    discovery: HostDiscovery = (
        HostDiscoveryScript(spec.discovery_script, spec.slots) if spec.discovery_script else FixedHosts(spec.hosts)
    )
    others = bool(spec.discovery_script) or not all(is_local(host.name) for host in spec.hosts)
    with SshFleet(new_secret(), spec.ssh, spec.interfaces, env=spec.task.env) as fleet:
        fleet.open(others=others)
        with ElasticController(spec, fleet, discovery, callbacks) as controller:
            return controller.run()
