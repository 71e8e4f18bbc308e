"""The door of a launcher: those who know the secret and say who they are come in, nobody else does."""

from __future__ import annotations

import os
import pickle
import resource
import socket
import threading
import time

import pytest

from hvd_cluster.errors import AuthenticationError
from hvd_cluster.launch.agent_message import Hello
from hvd_cluster.launch.door import Door
from hvd_cluster.rendezvous.channel import Channel
from hvd_cluster.rendezvous.secret import new_secret

SECRET = new_secret()


class Guests:
    """Those whom the door has let in; those called "unwanted" are sent away."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.channels: list[Channel] = []
        self._changed = threading.Condition()

    def let_in(self, hello: Hello, channel: Channel) -> bool:
        with self._changed:
            self.names.append(hello.name)
            self._changed.notify_all()
        if hello.name == "unwanted":
            return False
        self.channels.append(channel)
        return True

    def wait_for(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.names) >= count, 10)


def call(door: Door, name: str, secret: bytes = SECRET) -> Channel:
    sock = socket.create_connection(("127.0.0.1", door.port), timeout=10)
    try:
        channel = Channel.connect(sock, secret, 10)
    except AuthenticationError:
        sock.close()
        raise
    channel.send(pickle.dumps(Hello(name, "key", name, {}, "127.0.0.1", 1, 2)))
    return channel


def test_who_proves_the_secret_is_let_in_and_who_is_unwanted_hears_the_end() -> None:
    guests = Guests()
    door = Door(SECRET, guests.let_in, "127.0.0.1")
    try:
        with pytest.raises(AuthenticationError):
            call(door, "stranger", new_secret())
        welcome, unwanted = call(door, "welcome"), call(door, "unwanted")
        guests.wait_for(2)
        assert sorted(guests.names) == ["unwanted", "welcome"]
        with pytest.raises(EOFError):
            unwanted.recv()
        guests.channels[0].send(b"hello")
        assert welcome.recv() == b"hello"
        for channel in (welcome, unwanted, *guests.channels):
            channel.close()
    finally:
        door.close()


def test_what_cannot_be_understood_is_sent_away_and_the_next_is_heard() -> None:
    guests = Guests()
    door = Door(SECRET, guests.let_in, "127.0.0.1")
    try:
        with socket.create_connection(("127.0.0.1", door.port), timeout=10) as sock:
            stranger = Channel.connect(sock, SECRET, 10)
            stranger.send(b"chvd_cluster.launch.agent_message\nWhatIsNew\n.")  # a class that this version has not
            with pytest.raises(EOFError):
                stranger.recv()
        welcome = call(door, "welcome")
        guests.wait_for(1)
        for channel in (welcome, *guests.channels):
            channel.close()
    finally:
        door.close()


def test_one_who_says_nothing_keeps_no_one_else_waiting() -> None:
    guests = Guests()
    door = Door(SECRET, guests.let_in, "127.0.0.1")
    with socket.create_connection(("127.0.0.1", door.port)):
        began_s = time.monotonic()
        channel = call(door, "welcome")
        guests.wait_for(1)
        assert time.monotonic() - began_s < 5
        channel.close()
        guests.channels[0].close()
    door.close()


@pytest.mark.long
def test_a_door_that_found_no_descriptor_once_stays_open() -> None:
    guests = Guests()
    door = Door(SECRET, guests.let_in, "127.0.0.1")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    caller = socket.socket()
    try:
        first_free = os.dup(0)
        os.close(first_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (first_free, hard))
        try:
            caller.connect(("127.0.0.1", door.port))
            time.sleep(0.5)  # it cannot be let in now
            assert not guests.names
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        channel = Channel.connect(caller, SECRET, 10)
        channel.send(pickle.dumps(Hello("late", "key", "late", {}, "127.0.0.1", 1, 2)))
        guests.wait_for(1)
        again = call(door, "next")
        guests.wait_for(2)
        for other in (channel, again, *guests.channels):
            other.close()
    finally:
        door.close()
        caller.close()
