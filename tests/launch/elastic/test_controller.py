"""The controller of an elastic job, whose workers are played by the test."""

from __future__ import annotations

import contextlib
import errno
import json
import sys
import time

import pytest

from hvd_cluster.errors import LaunchError
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
from hvd_cluster.version import __version__

#: A worker that requests a rank and waits.
_WORKER = """
import json, sys, time
from hvd_cluster.rendezvous.client import KeyValueClient
from hvd_cluster.rendezvous.membership import DRIVER_BOX
from hvd_cluster.topology import Topology

here = Topology.from_env()
request = {"worker": here.worker, "request": "1", **json.loads(sys.argv[1])}
KeyValueClient(here.rendezvous, here.secret).push(DRIVER_BOX, json.dumps(request).encode())
time.sleep(60)
"""


def test_a_request_that_is_told_twice_counts_once() -> None:
    spec = ElasticSpec(
        task=Task(command=("true",)), hosts=(Host("localhost", 1), Host("127.0.0.1", 1)), num_proc=1, min_num_proc=1
    )
    with SshFleet(new_secret()) as fleet:
        fleet.open(others=False)
        with contextlib.closing(ElasticController(spec, fleet, FixedHosts(spec.hosts), Callbacks())) as controller:
            member = controller._members[0] = ElasticWorker(0, "w", "localhost", 0, 0)
            ours = {"worker": "w", "version": __version__}
            for request, then in (("a", Phase.WAITING), ("a", Phase.RUNNING), ("b", Phase.WAITING)):
                controller._requests.append({**ours, "has_state": False, "request": request, "skip_sync": False})
                controller._handle_requests()
                assert member.phase is then
                member.phase = Phase.RUNNING  # it is given its place
            assert not controller._state_exists
            controller._requests.append({**ours, "has_state": True})
            controller._handle_requests()
            assert (member.has_state, member.phase) == (True, Phase.RUNNING)
            controller._members.clear()
            controller._state_exists = False
            controller._requests.append({**ours, "has_state": True})  # of a worker that has ended
            controller._handle_requests()
            assert controller._state_exists


@pytest.mark.parametrize(("version", "there"), [({}, "another version"), ({"version": "99.9"}, "99.9")])
def test_a_worker_of_another_version_is_refused_and_its_host_excluded(
    version: dict[str, str], there: str, caplog: pytest.LogCaptureFixture
) -> None:
    task = Task(command=(sys.executable, "-c", _WORKER, json.dumps(version)))
    hosts = (Host("localhost", 1), Host("127.0.0.1", 1))
    spec = ElasticSpec(task=task, hosts=hosts, num_proc=1, min_num_proc=1)
    with SshFleet(new_secret()) as fleet:
        fleet.open(others=False)
        with ElasticController(spec, fleet, FixedHosts(hosts), Callbacks()) as controller:
            outcomes = controller.run()
        assert "127.0.0.1, localhost are excluded permanently" in caplog.text
        ending = (
            f"cannot take part: hvd_cluster is {there} there and {__version__} in the launcher; all hosts need the "
            "same Python environment"
        )
        assert len(outcomes) == 2
        assert {outcome.ending() for outcome in outcomes} == {ending}


@pytest.mark.parametrize("failing", ["start", "rendezvous"])
def test_a_worker_that_cannot_be_started_has_failed_and_the_others_continue(
    failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    hosts = (Host("localhost", 2), Host("127.0.0.1", 1))
    spec = ElasticSpec(task=Task(command=("true",)), hosts=hosts, num_proc=1, min_num_proc=1)
    with SshFleet(new_secret()) as fleet:
        fleet.open(others=False)
        monkeypatch.setattr(fleet, failing, refuse)
        with contextlib.closing(ElasticController(spec, fleet, FixedHosts(hosts), Callbacks())) as controller:
            fleet.add(hosts[0])
            with pytest.raises(LaunchError, match="a worker cannot be started: .*temporarily unavailable"):
                controller._start("localhost", {"localhost": 2})  # the first one
            assert not controller._members
            running = controller._members[0] = ElasticWorker(0, "w", "localhost", 0, 0)
            controller._start("localhost", {"localhost": 2})
            assert list(controller._members.values()) == [running]
            assert "could not be started: " in controller._failed[0].ending()
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
