"""A listener accepts peers that know the secret and send a handshake, and no others."""

from __future__ import annotations

import os
import pickle
import resource
import socket
import threading
import time

import pytest

from hvd_cluster.errors import AuthenticationError
from hvd_cluster.launch.wire.agent_messages import AgentHandshake
from hvd_cluster.launch.wire.listener import Listener, listen_for_handshakes
from hvd_cluster.rendezvous.channel import Channel
from hvd_cluster.rendezvous.secret import new_secret

SECRET = new_secret()


class Peers:
    """The peers that the listener has accepted; those called "unwanted" are disconnected."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.channels: list[Channel] = []
        self._changed = threading.Condition()

    def accept(self, handshake: AgentHandshake, channel: Channel) -> bool:
        with self._changed:
            self.names.append(handshake.name)
            self._changed.notify_all()
        if handshake.name == "unwanted":
            return False
        self.channels.append(channel)
        return True

    def wait_for(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.names) >= count, 10)


def call(listener: Listener, name: str, secret: bytes = SECRET) -> Channel:
    sock = socket.create_connection(("127.0.0.1", listener.port), timeout=10)
    try:
        channel = Channel.connect(sock, secret, 10)
    except AuthenticationError:
        sock.close()
        raise
    channel.send(pickle.dumps(AgentHandshake(name, "key", name, {}, "127.0.0.1", 1, 2)))
    return channel


def test_peers_that_know_the_secret_are_accepted_and_unwanted_ones_are_disconnected() -> None:
    peers = Peers()
    listener = listen_for_handshakes(SECRET, peers.accept, ["127.0.0.1"])
    try:
        with pytest.raises(AuthenticationError):
            call(listener, "stranger", new_secret())
        welcome, unwanted = call(listener, "welcome"), call(listener, "unwanted")
        peers.wait_for(2)
        assert sorted(peers.names) == ["unwanted", "welcome"]
        with pytest.raises(EOFError):
            unwanted.recv()
        peers.channels[0].send(b"handshake")
        assert welcome.recv() == b"handshake"
        for channel in (welcome, unwanted, *peers.channels):
            channel.close()
    finally:
        listener.close()


def test_a_peer_whose_handshake_cannot_be_unpickled_is_disconnected_and_the_next_is_served() -> None:
    peers = Peers()
    listener = listen_for_handshakes(SECRET, peers.accept, ["127.0.0.1"])
    try:
        with socket.create_connection(("127.0.0.1", listener.port), timeout=10) as sock:
            stranger = Channel.connect(sock, SECRET, 10)
            stranger.send(b"chvd_cluster.launch.wire.agent_messages\nWhatIsNew\n.")  # a class that this version has not
            with pytest.raises(EOFError):
                stranger.recv()
        welcome = call(listener, "welcome")
        peers.wait_for(1)
        for channel in (welcome, *peers.channels):
            channel.close()
    finally:
        listener.close()


def test_a_silent_peer_does_not_delay_the_next() -> None:
    peers = Peers()
    listener = listen_for_handshakes(SECRET, peers.accept, ["127.0.0.1"])
    with socket.create_connection(("127.0.0.1", listener.port)):
        began_s = time.monotonic()
        channel = call(listener, "welcome")
        peers.wait_for(1)
        assert time.monotonic() - began_s < 5
        channel.close()
        peers.channels[0].close()
    listener.close()


@pytest.mark.long
def test_a_listener_without_free_descriptors_accepts_again_later() -> None:
    peers = Peers()
    listener = listen_for_handshakes(SECRET, peers.accept, ["127.0.0.1"])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    caller = socket.socket()
    try:
        first_free = os.dup(0)
        os.close(first_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (first_free, hard))
        try:
            caller.connect(("127.0.0.1", listener.port))
            time.sleep(0.5)  # it cannot be accepted now
            assert not peers.names
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        channel = Channel.connect(caller, SECRET, 10)
        channel.send(pickle.dumps(AgentHandshake("late", "key", "late", {}, "127.0.0.1", 1, 2)))
        peers.wait_for(1)
        again = call(listener, "next")
        peers.wait_for(2)
        for other in (channel, again, *peers.channels):
            other.close()
    finally:
        listener.close()
        caller.close()
