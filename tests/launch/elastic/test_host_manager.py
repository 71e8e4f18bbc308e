from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from hvd_cluster.launch.elastic.discovery import FixedHosts, HostDiscovery
from hvd_cluster.launch.elastic.host_manager import Blacklist, HostManager
from hvd_cluster.launch.hosts import Host
from hvd_cluster.launch.ssh.fleet import SshFleet
from hvd_cluster.rendezvous.secret import new_secret


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


class CountingFleet(SshFleet):
    """Tells how often its hosts have asked how they reach each other."""

    num_probes = 0

    def probe(self) -> dict[str, str]:
        found = super().probe()
        self.num_probes += 1
        return found


class Growing(HostDiscovery):
    """This host, and from the second look on another one."""

    def __init__(self) -> None:
        self.num_looks = 0

    def find_available_hosts_and_slots(self) -> Mapping[str, int]:
        self.num_looks += 1
        return {"localhost": 1} if self.num_looks == 1 else {"localhost": 1, "elsewhere": 1}


@pytest.mark.processes
def test_a_lost_host_is_not_a_place_for_workers_until_it_is_reached_again(loopback_ssh: Path) -> None:
    with CountingFleet(new_secret()) as fleet:
        fleet.open(others=True)
        manager = HostManager(FixedHosts([Host("elsewhere", 2)]), fleet, None, 0.1, lambda: None)
        manager.start()
        try:
            assert manager.usable() == {"elsewhere": 2}
            assert fleet.num_probes == 1
            machine = fleet.host_key("elsewhere")
            (loopback_ssh / "hold").touch()
            os.kill(int((loopback_ssh / "pids").read_text()), signal.SIGKILL)
            wait_for(lambda: manager.usable() == {})
            for _ in range(20):  # the manager is calling it again
                assert manager.usable() == {}
                assert fleet.host_key("elsewhere") == machine  # its last workers may not be reaped yet
                time.sleep(0.05)
            (loopback_ssh / "hold").unlink()
            wait_for(lambda: manager.usable() == {"elsewhere": 2})
            assert len((loopback_ssh / "pids").read_text().split()) == 2
            # The connection is a new one, and the interface that the others reach must be found anew.
            assert fleet.num_probes == 2
        finally:
            manager.close()


class Moody(HostDiscovery):
    """Fails once, with an error that nobody foresaw."""

    def __init__(self) -> None:
        self.num_looks = 0

    def find_available_hosts_and_slots(self) -> Mapping[str, int]:
        self.num_looks += 1
        if self.num_looks == 3:
            raise KeyError("items")
        return {"localhost": 1 if self.num_looks < 3 else 2}


def test_a_discovery_that_fails_once_is_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    with SshFleet(new_secret()) as fleet:
        fleet.open(others=False)
        manager = HostManager(Moody(), fleet, None, 0.05, lambda: None)
        manager.start()
        try:
            assert manager.usable() == {"localhost": 1}
            wait_for(lambda: manager.usable() == {"localhost": 2})
        finally:
            manager.close()
    assert "could not be discovered this time: KeyError: 'items'" in caplog.text


class Clumsy(SshFleet):
    """Once fails to add a host in a way that nobody foresaw."""

    num_adds = 0

    def add(self, host: Host) -> str:
        if host.name == "elsewhere":
            self.num_adds += 1
            if self.num_adds == 1:
                raise RuntimeError("can't start new thread")
        return super().add(host)


@pytest.mark.processes
def test_a_look_that_fails_once_does_not_end_all_connecting(
    loopback_ssh: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Clumsy(new_secret()) as fleet:
        fleet.open(others=True)
        manager = HostManager(Growing(), fleet, None, 0.1, lambda: None)
        manager.start()
        try:
            wait_for(lambda: fleet.num_adds > 1 and "elsewhere" in manager.usable())
        finally:
            manager.close()
    assert "RuntimeError: can't start new thread" in caplog.text


@pytest.mark.processes
def test_an_end_does_not_wait_for_a_host_that_does_not_answer(loopback_ssh: Path) -> None:
    (loopback_ssh / "hold").touch()
    discovery = Growing()
    with SshFleet(new_secret()) as fleet:
        fleet.open(others=True)
        manager = HostManager(discovery, fleet, None, 0.1, lambda: None)
        manager.start()
        wait_for(lambda: discovery.num_looks == 2)
        time.sleep(0.5)
        assert manager.usable() == {"localhost": 1}
        began_s = time.monotonic()
        manager.close()
        assert time.monotonic() - began_s < 10


class PartlyDeaf(SshFleet):
    """Its host "deaf" connects when it is allowed to, or when the job ends."""

    def __init__(self) -> None:
        super().__init__(new_secret())
        self.may_connect = threading.Event()

    def add(self, host: Host) -> str:
        if host.name != "deaf":
            return super().add(host)
        self.may_connect.wait()
        self._add_local(host)
        return ""

    def give_up(self) -> None:
        super().give_up()
        self.may_connect.set()


class Listed(HostDiscovery):
    """The hosts that a test lists."""

    def __init__(self, *names: str) -> None:
        self.names: tuple[str, ...] = names

    def find_available_hosts_and_slots(self) -> Mapping[str, int]:
        return dict.fromkeys(self.names, 1)


def test_a_host_that_does_not_answer_delays_no_other_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvd_cluster.launch.elastic.host_manager._FIRST_WAIT_S", 0.5)
    discovery = Listed("localhost", "deaf")
    with PartlyDeaf() as fleet:
        fleet.open(others=False)
        manager = HostManager(discovery, fleet, None, 0.05, lambda: None)
        manager.start()
        try:
            assert manager.usable() == {"localhost": 1}
            discovery.names = ("deaf", "127.0.0.1")
            wait_for(lambda: manager.usable() == {"127.0.0.1": 1})
            fleet.may_connect.set()
            wait_for(lambda: manager.usable() == {"127.0.0.1": 1, "deaf": 1})
        finally:
            manager.close()


def test_a_start_waits_for_its_only_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvd_cluster.launch.elastic.host_manager._FIRST_WAIT_S", 0.0)
    with PartlyDeaf() as fleet:
        fleet.open(others=False)
        manager = HostManager(Listed("deaf"), fleet, None, 0.05, lambda: None)
        timer = threading.Timer(0.5, fleet.may_connect.set)
        timer.start()
        manager.start()
        assert manager.usable() == {"deaf": 1}
        manager.close()
        timer.join()


def test_a_failed_host_is_kept_out_forever_without_a_cool_down() -> None:
    blacklist = Blacklist(None, lambda: 0.0)
    assert not blacklist.holds("a", 0.0)
    assert blacklist.add("a", 0.0) is None
    assert blacklist.holds("a", 1e9)
    assert not blacklist.holds("b", 1e9)
    assert blacklist.hosts() == ["a"]


def test_a_cool_down_doubles_with_each_failure_and_is_bounded() -> None:
    blacklist = Blacklist((10.0, 50.0), lambda: 0.5)
    now_s, waits = 0.0, []
    for _ in range(4):
        wait_s = blacklist.add("a", now_s)
        assert wait_s is not None
        waits.append(wait_s)
        assert blacklist.holds("a", now_s + wait_s - 0.1)
        now_s += wait_s
        assert not blacklist.holds("a", now_s)
    assert waits == [15.0, 25.0, 45.0, 50.0]


def test_the_workers_of_one_host_that_fail_together_count_once() -> None:
    blacklist = Blacklist((10.0, 50.0), lambda: 0.0)
    assert blacklist.add("a", 0.0) == 10.0
    assert blacklist.add("a", 4.0) == pytest.approx(6.0)
    assert blacklist.add("a", 11.0) == pytest.approx(20.0)
