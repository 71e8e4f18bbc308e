"""Agents that are started through an ssh that leads back to this host."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

import hvd_cluster
from hvd_cluster.errors import LaunchError
from hvd_cluster.launch.hosts import Host
from hvd_cluster.launch.reachability import HostAddresses, listen_for_probes
from hvd_cluster.launch.ssh.agent_hub import AgentHub
from hvd_cluster.launch.ssh.fleet import SshFleet
from hvd_cluster.launch.ssh.options import SshOptions
from hvd_cluster.launch.task import Task
from hvd_cluster.launch.worker_group import Callbacks
from hvd_cluster.rendezvous.secret import new_secret
from hvd_cluster.rendezvous.session import SignedSession
from hvd_cluster.topology import Topology

SECRET = new_secret()


@pytest.mark.processes
def test_a_host_that_is_closed_twice_closes_nothing_of_others(loopback_ssh: Path) -> None:
    hub = AgentHub(SECRET, SshOptions(), ())
    try:
        hub.connect([Host("elsewhere", 1)], retry=False)
        remote = hub.remotes["elsewhere"]
        remote.request_end()
        remote.close(time.monotonic() + 10)
        # The lowest free numbers: that of the closed pipe is among them.
        others = [os.open("/dev/null", os.O_RDONLY) for _ in range(20)]
    finally:
        hub.close()
    for other in others:
        os.close(other)  # an error where somebody has closed it


@pytest.mark.processes
def test_an_answer_that_comes_too_late_is_not_taken_for_the_next_one(loopback_ssh: Path) -> None:
    hub = AgentHub(SECRET, SshOptions(), ())
    probe_listener = listen_for_probes(SECRET, "here")
    try:
        hub.connect([Host("elsewhere", 1)], retry=False)
        remote = hub.remotes["elsewhere"]
        candidate = HostAddresses("here", ("127.0.0.1",), probe_listener.port)
        assert remote.probe((candidate,), 0.0) == {}  # no answer comes in no time
        nowhere = HostAddresses("nowhere", ("127.0.0.1",), 9)
        assert remote.probe((nowhere,), 30) == {"nowhere": ()}
        answers: dict[int, object] = {}

        def ask(number: int) -> None:
            answers[number] = remote.probe((candidate if number % 2 else nowhere,), 30)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert answers == {n: {"here": ("127.0.0.1",)} if n % 2 else {"nowhere": ()} for n in range(8)}
    finally:
        probe_listener.close()
        hub.close()


@pytest.mark.processes
def test_a_host_with_another_version_is_named_with_both(loopback_ssh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = hvd_cluster.__version__
    monkeypatch.setattr("hvd_cluster.launch.ssh.agent_hub.__version__", "99.9")
    hub = AgentHub(SECRET, SshOptions(), ())
    try:
        with pytest.raises(LaunchError, match=f"elsewhere: hvd_cluster is {there} there and 99.9 here"):
            hub.connect([Host("elsewhere", 1)], retry=True)
    finally:
        hub.close()


@pytest.mark.processes
def test_a_lost_host_is_told_with_what_ssh_and_the_agent_said_last(loopback_ssh: Path) -> None:
    hub = AgentHub(SECRET, SshOptions(), ())
    try:
        hub.connect([Host("elsewhere", 1)], retry=False)
        remote = hub.remotes["elsewhere"]
        pid = int((loopback_ssh / "pids").read_text())
        with Path(f"/proc/{pid}/fd/2").open("w") as stderr:
            stderr.write("Timeout, server not responding.\n")
        os.kill(pid, signal.SIGKILL)
        worker = remote.start(0, Task(command=("true",)), Topology(), {}, Callbacks())
        outcome = worker.wait()
        assert outcome is not None
        assert (
            "lost its host elsewhere: ssh ended with code -9\n    Timeout, server not responding."
            in outcome.ending_text
        )
    finally:
        hub.close()


@pytest.mark.processes
def test_the_secret_and_the_environment_go_through_ssh_only(
    loopback_ssh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[bytes] = []
    seal = SignedSession.seal

    def record(self: SignedSession, message: bytes) -> None:
        sent.append(bytes(message))
        seal(self, message)

    monkeypatch.setattr(SignedSession, "seal", record)
    monkeypatch.setenv("API_KEY", "pa55w0rd")
    monkeypatch.setenv("LONG", "x" * 120_000)  # more than a pipe takes at once
    task = Task(
        command=("sh", "-c", "echo $_HOROVOD_SECRET_KEY $API_KEY $TOKEN $PLACE ${#LONG}"), env={"TOKEN": "t0k3n"}
    )
    lines: list[str] = []
    with SshFleet(SECRET, env=task.env) as fleet:
        fleet.connect([Host("elsewhere", 1)])
        topology = Topology(secret=SECRET, worker="w")
        callbacks = Callbacks(on_line=lambda _r, _s, line: lines.append(line))
        worker = fleet.start("elsewhere", task, topology, {"PLACE": "0"}, callbacks)
        worker.wait()
    assert lines == [f"{SECRET.hex()} pa55w0rd t0k3n 0 120000"]
    assert any(b"PLACE" in message for message in sent)
    for hidden in (SECRET, SECRET.hex().encode(), b"pa55w0rd", b"t0k3n"):
        assert not any(hidden in message for message in sent)
