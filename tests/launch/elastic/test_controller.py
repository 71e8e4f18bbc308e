"""The controller of an elastic job, whose workers are played by the test."""

from __future__ import annotations

import contextlib
import time

from hvd_cluster.launch.elastic.controller import ElasticController
from hvd_cluster.launch.elastic.discovery import FixedHosts
from hvd_cluster.launch.elastic.elastic_worker import ElasticWorker
from hvd_cluster.launch.elastic.policy import Phase
from hvd_cluster.launch.hosts import Host
from hvd_cluster.launch.spec import ElasticSpec
from hvd_cluster.launch.ssh.fleet import SshFleet
from hvd_cluster.launch.task import Task
from hvd_cluster.launch.worker_group import Callbacks
from hvd_cluster.rendezvous.secret import new_secret


def test_a_request_that_is_told_twice_counts_once() -> None:
    spec = ElasticSpec(
        task=Task(command=("true",)), hosts=(Host("localhost", 1), Host("127.0.0.1", 1)), num_proc=1, min_num_proc=1
    )
    with SshFleet(new_secret()) as fleet:
        fleet.open(others=False)
        with contextlib.closing(ElasticController(spec, fleet, FixedHosts(spec.hosts), Callbacks())) as controller:
            member = controller._members[0] = ElasticWorker(0, "w", "localhost", 0, 0)
            for request, then in (("a", Phase.WAITING), ("a", Phase.RUNNING), ("b", Phase.WAITING)):
                controller._requests.append({"worker": "w", "request": request})
                controller._handle_requests()
                assert member.phase is then
                member.phase = Phase.RUNNING  # it is given its place
            controller._members.clear()


def test_the_time_of_the_first_discovery_does_not_count_as_a_shortage() -> None:
    class SlowHosts(FixedHosts):
        def find_available_hosts_and_slots(self) -> dict[str, int]:
            time.sleep(2 * spec.elastic_timeout_s)
            return super().find_available_hosts_and_slots()

    hosts = (Host("localhost", 1), Host("127.0.0.1", 1))
    task = Task(command=("true",))
    spec = ElasticSpec(task=task, hosts=hosts, num_proc=1, min_num_proc=1, elastic_timeout_s=0.5)
    with SshFleet(new_secret()) as fleet:
        fleet.open(others=False)
        with ElasticController(spec, fleet, SlowHosts(hosts), Callbacks()) as controller:
            assert all(outcome.ok for outcome in controller.run())
