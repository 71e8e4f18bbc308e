"""A worker and its driver, who talk through the store; the driver's part is played here."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator

import pytest

from hvd_cluster.engine.world import assemble
from hvd_cluster.errors import StaleWorldError
from hvd_cluster.rendezvous.client import KeyValueClient, KeyValueMailbox
from hvd_cluster.rendezvous.membership import DRIVER_BOX, Membership, host_update_box, topology_box
from hvd_cluster.rendezvous.secret import new_secret
from hvd_cluster.rendezvous.server import KeyValueServer
from hvd_cluster.settings import Settings
from hvd_cluster.topology import Topology
from hvd_cluster.version import __version__

SECRET = new_secret()
PLACE = {
    "rank": 1,
    "size": 3,
    "local_rank": 0,
    "local_size": 1,
    "cross_rank": 1,
    "cross_size": 3,
    "host": "b",
    "master": "b:1",
    "interface": "ib0",
    "devices": "3,0",
    "newcomers": 2,
    "lost": 1,
    "sync": False,
    "since": 12.5,
}


@pytest.fixture
def server() -> Iterator[KeyValueServer]:
    with KeyValueServer(SECRET) as server:
        yield server


@pytest.fixture
def driver(server: KeyValueServer) -> Iterator[KeyValueClient]:
    client = KeyValueClient(f"127.0.0.1:{server.port}", SECRET)
    yield client
    client.close()


@pytest.fixture
def member(server: KeyValueServer) -> Iterator[Membership]:
    member = Membership(Topology(rendezvous=f"127.0.0.1:{server.port}", secret=SECRET, worker="w7", job_id="j"))
    yield member
    member.close()


def test_a_worker_asks_and_is_told_its_place_again_and_again(member: Membership, driver: KeyValueClient) -> None:
    asked = KeyValueMailbox(driver, DRIVER_BOX)
    address = member.topology.rendezvous
    requests = set()
    for generation in (4, 6):
        answer = {**PLACE, "generation": generation, "rendezvous": address}
        driver.push(topology_box("w7"), json.dumps(answer).encode())
        place = member.next_topology(5)
        request = json.loads(asked.next(5))
        assert (request["worker"], request["version"]) == ("w7", __version__)
        assert set(request) == {"worker", "version", "has_state", "request", "skip_sync"}
        requests.add(request["request"])
        assert (place.rank, place.size, place.cross_size, place.generation) == (1, 3, 3, generation)
        assert (place.secret, place.job_id, place.worker) == (SECRET, "j", "w7")
        assert (member.interface, member.devices) == ("ib0", "3,0")
        assert (member.num_newcomers, member.num_lost, member.must_sync) == (2, 1, False)
        assert member.since == 12.5
    assert len(requests) == 2
    driver.push(host_update_box("w7"), b"the hosts have changed")
    updates = member.host_updates()
    assert updates.next(5) == b"the hosts have changed"
    updates.close()


def test_a_worker_reports_once_that_it_has_the_state_and_repeats_it_in_its_requests(
    member: Membership, driver: KeyValueClient
) -> None:
    received = KeyValueMailbox(driver, DRIVER_BOX)
    driver.push(topology_box("w7"), json.dumps({**PLACE, "generation": 2, "rendezvous": "a:1"}).encode())
    driver.push(topology_box("w7"), json.dumps({**PLACE, "generation": 3, "rendezvous": "a:1"}).encode())
    member.next_topology(5)
    assert json.loads(received.next(5))["has_state"] is False
    member.report_state()
    member.report_state()
    assert json.loads(received.next(5)) == {"worker": "w7", "version": __version__, "has_state": True}
    member.next_topology(5)
    request = json.loads(received.next(5))
    assert ("request" in request, request["has_state"]) == (True, True)


@pytest.mark.long
def test_a_worker_that_is_ready_waits_for_those_that_train(member: Membership, driver: KeyValueClient) -> None:
    place = json.dumps({**PLACE, "generation": 2, "rendezvous": member.topology.rendezvous}).encode()
    push = threading.Timer(0.7, driver.push, (topology_box("w7"), place))
    push.start()
    assert member.next_topology(0.2).generation == 2
    push.join()


def test_a_worker_whose_connection_was_cut_off_while_it_trained_asks_over_a_new_one(
    member: Membership, driver: KeyValueClient
) -> None:
    place = json.dumps({**PLACE, "generation": 2, "rendezvous": member.topology.rendezvous}).encode()
    for _ in range(2):
        driver.push(topology_box("w7"), place)
        assert member.next_topology(30).generation == 2
        member._client._channel._socket.shutdown(socket.SHUT_RDWR)


def test_a_worker_that_is_not_needed_any_more_exits(member: Membership, driver: KeyValueClient) -> None:
    driver.push(topology_box("w7"), b'{"leave": "its host is gone"}')
    with pytest.raises(SystemExit) as caught:
        member.next_topology(5)
    assert not caught.value.code


def test_a_worker_whose_driver_has_gone_says_so(server: KeyValueServer, member: Membership) -> None:
    threading.Timer(0.2, server.close).start()
    with pytest.raises(ConnectionError, match="the launcher of this job has ended or died"):
        member.next_topology(30)


def test_a_stale_worker_does_not_get_into_a_world_that_is_over(server: KeyValueServer) -> None:
    place = Topology(rank=1, size=2, rendezvous=f"127.0.0.1:{server.port}", secret=SECRET, generation=3)
    threading.Timer(0.3, server.close_keys, ("world/3.",)).start()
    with pytest.raises(StaleWorldError):  # while it waits for the others
        assemble(place, Settings(), 0)
    with pytest.raises(StaleWorldError):  # when it comes too late
        assemble(place, Settings(), 0)
