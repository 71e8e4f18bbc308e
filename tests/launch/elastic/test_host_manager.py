"""Hosts of an elastic job that go and come back, with real agents."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from hvd_cluster.launch.elastic.discovery import FixedHosts
from hvd_cluster.launch.elastic.host_manager import HostManager
from hvd_cluster.launch.fleet import Fleet
from hvd_cluster.launch.hosts import Host
from hvd_cluster.rendezvous.secret import new_secret


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_a_lost_host_is_no_place_for_workers_until_it_is_reached_again(loopback_ssh: Path) -> None:
    with Fleet(new_secret()) as fleet:
        fleet.open(others=True)
        manager = HostManager(FixedHosts([Host("elsewhere", 2)]), fleet, None, 0.1, lambda: None)
        manager.start()
        try:
            assert manager.usable() == {"elsewhere": 2}
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
        finally:
            manager.close()
