"""An agent whose launcher is played by the test."""

from __future__ import annotations

import contextlib
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from crowded import crowded_port

from hvd_cluster.launch.agent import Agent, _connect_to_launcher
from hvd_cluster.launch.task import Task
from hvd_cluster.launch.wire.agent_messages import (
    END,
    WINDOW_BYTES,
    Acknowledged,
    AgentHandshake,
    BootstrapMessage,
    SignalWorker,
    StartWorker,
    WorkerSignal,
    WorkerStatus,
)
from hvd_cluster.launch.wire.messages import OutputLine
from hvd_cluster.rendezvous.channel import Channel
from hvd_cluster.rendezvous.secret import new_secret
from hvd_cluster.topology import Topology

SECRET = new_secret()
NUM_LINES = 1500
FLOOD = ("sh", "-c", f"i=0; while [ $i -lt {NUM_LINES} ]; do i=$((i + 1)); echo $i; done; echo {'x' * 60_000}")


@pytest.fixture
def launcher() -> Iterator[Channel]:
    """The launcher's end of a conversation with an agent."""
    near, far = socket.socketpair()

    def serve() -> None:
        with contextlib.suppress(EOFError, OSError), contextlib.closing(Channel.connect(far, SECRET)) as channel:
            Agent(channel).serve("here", SECRET)

    agent = threading.Thread(target=serve)
    agent.start()
    channel = Channel.accept(near, SECRET)
    assert isinstance(pickle.loads(channel.recv()), AgentHandshake)
    yield channel
    with contextlib.suppress(OSError):
        channel.send(END)
    agent.join(60)
    channel.close()
    assert not agent.is_alive()


def test_an_agent_whose_connection_was_dropped_connects_again() -> None:
    with crowded_port(SECRET) as port:
        channel = _connect_to_launcher(
            BootstrapMessage(name="here", addresses=["127.0.0.1"], port=port, secret=SECRET.hex(), cwd="/", sys_path=[])
        )
        assert channel is not None
        channel.close()


def start(launcher: Channel, *command: str) -> None:
    order = StartWorker(0, Task(command=command), Topology(secret=SECRET), {})
    launcher.send(pickle.dumps(order))


def heard_until_silence(launcher: Channel) -> list[bytes]:
    """What the agent says before it is silent for a second, or its worker has ended."""
    messages: list[bytes] = []
    launcher.settimeout(1.0)
    with contextlib.suppress(TimeoutError):
        while not messages or not has_ended(messages[-1]):
            messages.append(launcher.recv())
    launcher.settimeout(None)
    return messages


def has_ended(message: bytes) -> bool:
    status = pickle.loads(message)
    return isinstance(status, WorkerStatus) and status.outcome is not None


def lines_of(messages: list[bytes]) -> list[bytes]:
    return [message for message in messages if isinstance(pickle.loads(message), OutputLine)]


@pytest.mark.slow
def test_a_launcher_that_takes_no_output_is_sent_one_window_of_it_and_the_rest_when_it_does(launcher: Channel) -> None:
    start(launcher, *FLOOD)
    messages: list[bytes] = []
    while not messages or not has_ended(messages[-1]):
        news = heard_until_silence(launcher)
        sizes = [len(line) for line in lines_of(news)]
        under_way = sum(sizes)
        assert under_way <= max([WINDOW_BYTES, *(WINDOW_BYTES // 4 + size for size in sizes)])
        launcher.send(pickle.dumps(Acknowledged(under_way)))
        messages += news
    assert pickle.loads(messages[-1]).outcome.ok
    assert [pickle.loads(line).text for line in lines_of(messages)] == [
        *map(str, range(1, NUM_LINES + 1)),
        "x" * 60_000,
    ]


@pytest.mark.processes
def test_a_worker_whose_output_no_one_takes_can_be_ended(launcher: Channel) -> None:
    start(launcher, sys.executable, "-c", "while True: print('flood')")
    assert sum(map(len, lines_of(heard_until_silence(launcher)))) <= WINDOW_BYTES
    launcher.send(pickle.dumps(SignalWorker(0, WorkerSignal.KILL)))
    launcher.send(END)
    while not has_ended(message := launcher.recv()):
        pass
    assert pickle.loads(message).outcome.stopped


def test_workers_of_an_agent_do_not_ignore_the_signals_that_it_leaves_to_the_launcher() -> None:
    code = """
import io, subprocess, sys
from hvd_cluster.launch import agent

sys.stdin = io.TextIOWrapper(io.BytesIO())
agent.main()
subprocess.run(["grep", "SigIgn", "/proc/self/status"], check=True)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    ignored = int(result.stdout.split()[1], 16)
    assert not [number for number in (signal.SIGINT, signal.SIGHUP) if ignored >> (number - 1) & 1]
