"""Tasks that connect: a real listener and real connections, and no Spark behind them."""

from __future__ import annotations

import contextlib
import pickle
import socket
import threading
from collections.abc import Mapping
from typing import Any

import pytest

from hvd_cluster.launch.remote import RemoteHost
from hvd_cluster.launch.wire.agent_messages import AgentHandshake
from hvd_cluster.rendezvous.channel import Channel
from hvd_cluster.rendezvous.secret import new_secret
from hvd_cluster.spark.elastic.task_pool import TaskPool

LOOPBACK = "127.0.0.1"


class NoSpark:
    """What a TaskPool asks of a session before it has submitted any task, and when it closes."""

    def driver_hosts(self) -> tuple[str, list[str]]:
        return LOOPBACK, [LOOPBACK]

    def cancel(self, tag: str) -> None:
        del tag


def test_a_task_is_there_when_its_words_have_arrived_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    secret, changed = new_secret(), threading.Event()
    session: Any = NoSpark()
    task_pool = TaskPool(session, 1, secret, None)
    task_pool.on_change = changed.set
    attach, seen = RemoteHost.attach, []

    def look_and_attach(remote: RemoteHost, handshake: AgentHandshake, channel: Channel) -> None:
        found: Mapping[str, int] = task_pool.find_available_hosts_and_slots()
        seen.append(found)
        attach(remote, handshake, channel)

    monkeypatch.setattr(RemoteHost, "attach", look_and_attach)
    sock = socket.create_connection((LOOPBACK, task_pool._listener.port), 10)
    with contextlib.closing(Channel.connect(sock, secret, 10)) as channel:
        channel.send(pickle.dumps(AgentHandshake("task-0", "key", "task-0", {}, LOOPBACK, 1, 2)))
        task_pool.wait_for(1, 10)
        assert task_pool.find_available_hosts_and_slots() == {"task-0": 1}
        remote = task_pool.remote("task-0")
        assert remote is not None
        assert remote.handshake is not None
    task_pool.close()
    assert seen == [{}]
