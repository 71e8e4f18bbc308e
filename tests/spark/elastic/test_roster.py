"""Tasks that call: a real door and real connections, and no Spark behind them."""

from __future__ import annotations

import contextlib
import pickle
import socket
import threading
from collections.abc import Mapping
from typing import Any

import pytest

from hvd_cluster.launch.agent_message import Hello
from hvd_cluster.launch.remote import RemoteHost
from hvd_cluster.rendezvous.channel import Channel
from hvd_cluster.rendezvous.secret import new_secret
from hvd_cluster.spark.elastic.roster import Roster

LOOPBACK = "127.0.0.1"


class NoSpark:
    """What a roster asks of a session before it has put any task on offer, and when it closes."""

    def driver_hosts(self) -> tuple[str, list[str]]:
        return LOOPBACK, [LOOPBACK]

    def cancel(self, tag: str) -> None:
        del tag


def test_a_task_is_there_when_its_words_have_arrived_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    secret, changed = new_secret(), threading.Event()
    session: Any = NoSpark()
    roster = Roster(session, 1, secret, None, changed.set)
    attach, seen = RemoteHost.attach, []

    def look_and_attach(remote: RemoteHost, hello: Hello, channel: Channel) -> None:
        found: Mapping[str, int] = roster.find_available_hosts_and_slots()
        seen.append(found)
        attach(remote, hello, channel)

    monkeypatch.setattr(RemoteHost, "attach", look_and_attach)
    sock = socket.create_connection((LOOPBACK, roster._door.port), 10)
    with contextlib.closing(Channel.connect(sock, secret, 10)) as channel:
        channel.send(pickle.dumps(Hello("task-0", "key", "task-0", {}, LOOPBACK, 1, 2)))
        roster.wait_for(1, 10)
        assert roster.find_available_hosts_and_slots() == {"task-0": 1}
        remote = roster.remote("task-0")
        assert remote is not None
        assert remote.hello is not None
    roster.close()
    assert seen == [{}]
