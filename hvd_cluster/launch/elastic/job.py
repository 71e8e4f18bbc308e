"""An elastic job from end to end."""

from __future__ import annotations

import contextlib

from hvd_cluster.launch.elastic.discovery import FixedHosts, HostDiscovery, HostDiscoveryScript
from hvd_cluster.launch.elastic.driver import ElasticDriver
from hvd_cluster.launch.elastic.host_manager import HostManager
from hvd_cluster.launch.elastic.spec import ElasticSpec
from hvd_cluster.launch.hosts import is_local
from hvd_cluster.launch.logs import OnLine
from hvd_cluster.launch.outcome import Outcome
from hvd_cluster.launch.process import OnEvent, ignore_event
from hvd_cluster.launch.ssh.fleet import SshFleet
from hvd_cluster.rendezvous.secret import new_secret


def run_elastic(spec: ElasticSpec, *, on_line: OnLine, on_event: OnEvent = ignore_event) -> list[Outcome]:
    """Run the task on between ``min_num_proc`` and ``max_num_proc`` workers until they have finished.

    Whatever happens, also an interrupt, no process of the job is left on any host when this returns or raises.

    Args:
        spec: what and where.
        on_line: gets the workers' lines.
        on_event: gets the workers' progress reports.

    Returns:
        How the members of the last world ended.

    Raises:
        LaunchError: the hosts cannot be discovered, were too few for too long, or changed too often.
    """
    discovery: HostDiscovery = (
        HostDiscoveryScript(spec.discovery_script, spec.slots) if spec.discovery_script else FixedHosts(spec.hosts)
    )
    others = bool(spec.discovery_script) or not all(is_local(host.name) for host in spec.hosts)
    with contextlib.ExitStack() as stack:
        fleet = stack.enter_context(SshFleet(new_secret(), spec.ssh, spec.interfaces, env=spec.task.env))
        fleet.open(others=others)
        driver = ElasticDriver(spec, fleet, on_line, on_event)
        hosts = HostManager(discovery, fleet, spec.cooldown_range_s, spec.discovery_interval_s, driver.wakeup.set)
        stack.callback(hosts.close)
        stack.callback(driver.close)  # first: whatever a look at the hosts waits for, the workers end now
        hosts.start()
        return driver.run(hosts)
