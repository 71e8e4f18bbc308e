"""Where the launcher and its agents listen; the agents are started through an ssh that leads back to this host."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from hvd_cluster.launch.hosts import Host
from hvd_cluster.launch.ssh.agent_hub import AgentHub
from hvd_cluster.launch.ssh.fleet import SshFleet
from hvd_cluster.launch.ssh.options import SshOptions
from hvd_cluster.rendezvous.addresses import outward_interfaces
from hvd_cluster.rendezvous.secret import new_secret
from hvd_cluster.rendezvous.sockets import ANY, IPV6_ADDRESSES

#: All interfaces of this host.
EVERYWHERE = [ANY, "::"] if IPV6_ADDRESSES.exists() else [ANY]


def listening(pid: int) -> list[str]:
    """The addresses at which a process listens."""
    found = psutil.Process(pid).net_connections("tcp")
    return sorted(connection.laddr.ip for connection in found if connection.status == psutil.CONN_LISTEN)


def agent(folder: Path) -> int:
    """The process id of the agent that was started last."""
    return int((folder / "pids").read_text().split()[-1])


@pytest.mark.processes
def test_once_all_hosts_are_there_no_one_listens_on_all_interfaces(loopback_ssh: Path) -> None:
    before = listening(os.getpid())
    with SshFleet(new_secret()) as fleet:
        fleet.connect([Host("elsewhere", 2)])
        assert not set(EVERYWHERE) & set(listening(os.getpid()))
        address, _, port = fleet.rendezvous("elsewhere").rpartition(":")
        assert sorted([*before, "127.0.0.1", address]) == listening(os.getpid())
        assert int(port) != fleet.server.port
        remote = fleet._hosts["elsewhere"].remote
        assert remote is not None
        remote.probe((), 10.0)  # the agent has heard what came before
        assert listening(agent(loopback_ssh)) == []
    assert listening(os.getpid()) == before


def one_interface() -> tuple[str, str]:
    """Its name and its address."""
    for name, address in outward_interfaces().items():
        return name, address
    pytest.skip("this host has no network interface but the loopback one")


@pytest.mark.processes
def test_agents_of_an_elastic_job_listen_on_the_interfaces_that_were_named_and_else_on_all(loopback_ssh: Path) -> None:
    name, address = one_interface()
    before = listening(os.getpid())
    for wanted, there in (([name], [address]), ([], EVERYWHERE), (["nosuch0"], EVERYWHERE)):
        with SshFleet(new_secret(), interfaces=wanted) as fleet:
            fleet.open(others=True)
            assert fleet.add(Host("elsewhere", 1)) == ""
            # By which of its interfaces the next host will come, the launcher cannot know.
            assert listening(os.getpid()) == sorted([*before, "127.0.0.1", *EVERYWHERE])
            assert listening(agent(loopback_ssh)) == there


@pytest.mark.processes
def test_a_launcher_whose_host_takes_part_listens_on_the_interfaces_that_were_named(loopback_ssh: Path) -> None:
    name, address = one_interface()
    before = listening(os.getpid())
    for wanted, listened in (([name], [address]), ([], EVERYWHERE)):
        hub = AgentHub(new_secret(), SshOptions(), wanted, takes_part=True)
        try:
            hub.connect([Host("elsewhere", 1)], retry=False)
            assert listening(os.getpid()) == sorted([*before, *listened])
        finally:
            hub.close()
