"""Peers that cannot prove that they hold the job's secret, on every port that we listen on: no code of theirs runs, and
whoever holds the secret is served all the same."""

from __future__ import annotations

import pickle
import queue
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from hvd_cluster.launch.reachability import listen_for_probes
from hvd_cluster.launch.wire.agent_messages import AgentHandshake
from hvd_cluster.launch.wire.listener import listen_for_handshakes
from hvd_cluster.rendezvous.channel import Channel
from hvd_cluster.rendezvous.client import KeyValueClient
from hvd_cluster.rendezvous.secret import new_secret
from hvd_cluster.rendezvous.server import KeyValueServer
from hvd_cluster.rendezvous.session import SignedSession

#: More than any of the services lets prove themselves at the same time.
MANY = 700


class Bomb:
    """Unpickling it writes a file."""

    def __init__(self, file: str) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return (open, (self.file, "w"))


def called(port: int) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port), timeout=10)
    sock.settimeout(10)
    return sock


def framed(payload: bytes) -> bytes:
    """What a signed message looks like, but for the signature."""
    return struct.pack(">Q", len(payload)) + b"\0" * 32 + payload


def greeting() -> bytes:
    """The first bytes of a conversation, as anybody can send them."""
    return bytes(SignedSession(b"a guess", accepts=False).outgoing)


ATTACKS: dict[str, Callable[[bytes], bytes]] = {
    "junk": lambda bomb: b"\xff\x00" * 5000,
    "http": lambda bomb: b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a pickle": lambda bomb: bomb,
    "a framed pickle": framed,
    "a greeting and a pickle": lambda bomb: greeting() + framed(bomb) + framed(bomb),
    "a greeting and a length without an end": lambda bomb: greeting() + struct.pack(">Q", 1 << 60),
}


@contextmanager
def rendezvous(secret: bytes) -> Iterator[tuple[int, Callable[[], object]]]:
    def served() -> None:
        client = KeyValueClient(f"127.0.0.1:{server.port}", secret, 20.0)
        client.set("key", b"value")
        assert client.get("key", 5.0) == b"value"
        client.close()

    with KeyValueServer(secret) as server:
        yield server.port, served


@contextmanager
def driver_of_agents(secret: bytes) -> Iterator[tuple[int, Callable[[], object]]]:
    arrived: queue.SimpleQueue[str] = queue.SimpleQueue()

    def accept(handshake: AgentHandshake, channel: Channel) -> bool:
        arrived.put(handshake.hostname)
        return False

    def served() -> None:
        channel = Channel.connect(called(listener.port), secret, 20.0)
        channel.send(pickle.dumps(AgentHandshake("host", "key", "mine", {}, "127.0.0.1", 1, 2)))
        assert arrived.get(timeout=20) == "mine"
        channel.close()

    listener = listen_for_handshakes(secret, accept, ["127.0.0.1"])
    try:
        yield listener.port, served
    finally:
        listener.close()


@contextmanager
def probe_listener(secret: bytes) -> Iterator[tuple[int, Callable[[], object]]]:
    def served() -> None:
        channel = Channel.connect(called(service.port), secret, 20.0)
        channel.settimeout(20.0)
        assert channel.recv() == b"me"
        channel.close()

    service = listen_for_probes(secret, "me")
    try:
        yield service.port, served
    finally:
        service.close()


@contextmanager
def spark_driver(secret: bytes) -> Iterator[tuple[int, Callable[[], object]]]:
    pytest.importorskip("pyspark", reason="needs pyspark")
    from hvd_cluster.launch.wire.messages import OutputLine
    from hvd_cluster.spark.driver_connection import DriverConnection
    from hvd_cluster.spark.message_server import MessageServer

    messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
    listener = MessageServer(secret, "127.0.0.1", messages)

    def served() -> None:
        with DriverConnection([f"127.0.0.1:{listener.port}"], secret) as line:
            assert line.connected
            line.send(OutputLine(0, "stdout", "mine"))
            assert messages.get(timeout=20).text == "mine"

    try:
        yield listener.port, served
    finally:
        listener.close()


SERVICES = [rendezvous, driver_of_agents, probe_listener, spark_driver]


@pytest.mark.parametrize("service", SERVICES, ids=lambda service: service.__name__)
def test_strangers_run_nothing_and_keep_no_one_waiting(service: Any, tmp_path: Path) -> None:
    exploded = tmp_path / "exploded"
    bomb = pickle.dumps(Bomb(str(exploded)))
    with service(new_secret()) as (port, served):
        with ExitStack() as strangers:
            for attack in ATTACKS.values():
                strangers.enter_context(called(port)).sendall(attack(bomb))
            start_s = time.monotonic()
            served()
            assert time.monotonic() - start_s < 10
        served()
    assert not exploded.exists()


@pytest.mark.slow
@pytest.mark.parametrize("service", SERVICES, ids=lambda service: service.__name__)
def test_a_crowd_that_says_nothing_keeps_no_one_waiting(service: Any) -> None:
    with service(new_secret()) as (port, served), ExitStack() as crowd:
        for _ in range(MANY):
            crowd.enter_context(called(port))
        start_s = time.monotonic()
        served()
        assert time.monotonic() - start_s < 15
