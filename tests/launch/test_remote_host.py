"""A host whose agent is played by the test."""

from __future__ import annotations

import contextlib
import pickle
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from hvd_cluster.launch.hosts import Host
from hvd_cluster.launch.outcome import Outcome
from hvd_cluster.launch.remote import RemoteHost, RemoteWorker
from hvd_cluster.launch.task import Task
from hvd_cluster.launch.wire.agent_messages import AgentHandshake, StartWorker, WorkerStatus
from hvd_cluster.launch.wire.messages import ProgressEvent
from hvd_cluster.launch.worker_group import Callbacks, StopCall
from hvd_cluster.rendezvous.channel import Channel
from hvd_cluster.rendezvous.secret import new_secret
from hvd_cluster.topology import Topology

SECRET = new_secret()


@pytest.fixture
def agent() -> Iterator[tuple[RemoteHost, Channel]]:
    """A host, and the agent's end of the conversation."""
    near, far = socket.socketpair()
    accepted: list[Channel] = []
    thread = threading.Thread(target=lambda: accepted.append(Channel.accept(near, SECRET)))
    thread.start()
    with contextlib.closing(Channel.connect(far, SECRET)) as channel:
        thread.join()
        host = RemoteHost(Host("elsewhere", 1), lambda: None)
        host.attach(AgentHandshake("elsewhere", "key", "elsewhere", {}, "127.0.0.1", 1, 2), accepted[0])
        yield host, channel
    host.close(0.0)


def started(host: RemoteHost, channel: Channel, key: int) -> RemoteWorker:
    """A worker of which the agent has heard."""
    worker = host.start(key, Task(command=("true",)), Topology(), {}, Callbacks())
    assert isinstance(pickle.loads(channel.recv()), StartWorker)
    return worker


def test_an_agent_that_cannot_be_understood_loses_its_workers(agent: tuple[RemoteHost, Channel]) -> None:
    host, channel = agent
    worker = started(host, channel, 0)
    channel.send(b"c" + b"hvd_cluster.launch.wire.agent_messages\nWhatIsNew\n.")  # a class that this version has not
    outcome = worker.wait()
    assert outcome is not None
    assert "a message of its agent cannot be handled: AttributeError" in outcome.ending_text


def test_the_process_and_host_of_a_worker_are_those_that_its_agent_says(agent: tuple[RemoteHost, Channel]) -> None:
    host, channel = agent
    worker = started(host, channel, 0)
    assert worker.place == f"not started yet on {Topology().host}"
    ended = WorkerStatus(0, ready=True, reported=None, outcome=Outcome(0, "elsewhere"), place="process 7 on elsewhere")
    channel.send(pickle.dumps(ended))
    worker.wait()
    assert worker.place == "process 7 on elsewhere"


def test_nothing_is_kept_of_a_worker_that_has_ended_nor_of_a_host_that_has_gone(
    agent: tuple[RemoteHost, Channel],
) -> None:
    host, channel = agent
    worker, other = started(host, channel, 0), started(host, channel, 1)
    channel.send(pickle.dumps(WorkerStatus(0, ready=True, reported=None, outcome=Outcome(0, "elsewhere"))))
    worker.wait()
    channel.close()
    assert other.wait() is not None
    host.close(0.0)
    assert host._workers == {}
    assert host._channel is not None
    assert host._channel.fileno() == -1


def test_a_callback_that_stops_the_call_or_fails_leaves_the_connection_to_its_worker(
    agent: tuple[RemoteHost, Channel], caplog: pytest.LogCaptureFixture
) -> None:
    def on_event(rank: int, fields: dict[str, Any]) -> None:
        raise fields["raises"]

    host, channel = agent
    changed = threading.Event()
    callbacks = Callbacks(on_event=on_event, on_change=changed.set)
    worker = host.start(0, Task(command=("true",)), Topology(), {}, callbacks)
    channel.send(pickle.dumps(ProgressEvent(0, {"raises": ValueError("mine")})))
    channel.send(pickle.dumps(ProgressEvent(0, {"raises": StopCall("enough")})))
    assert changed.wait(30)
    assert str(worker.stop_call) == "enough"
    assert "ValueError: mine" in caplog.text
    channel.send(pickle.dumps(WorkerStatus(0, ready=True, reported=None, outcome=Outcome(0, "elsewhere"))))
    assert worker.wait() == Outcome(0, "elsewhere")


def test_a_host_that_goes_closes_its_connection_by_itself(agent: tuple[RemoteHost, Channel]) -> None:
    host, channel = agent
    worker = started(host, channel, 0)
    channel.close()
    worker.wait()
    assert host._channel is not None
    assert host._channel.fileno() == -1
