"""A worker that hears news of its driver, whose part is played here."""

from __future__ import annotations

import json
import threading

import pytest

from hvd_cluster.elastic import notification
from hvd_cluster.elastic.notification import NotificationManager
from hvd_cluster.elastic.state import HostUpdateResult, ObjectState
from hvd_cluster.rendezvous import membership
from hvd_cluster.rendezvous.client import KeyValueClient
from hvd_cluster.rendezvous.secret import new_secret
from hvd_cluster.rendezvous.server import KeyValueServer
from hvd_cluster.topology import Topology

SECRET = new_secret()


class Listener(ObjectState):
    """Notes what it hears."""

    def __init__(self) -> None:
        super().__init__(lambda obj: obj, lambda: 0)
        self.heard: list[float] = []
        self.has_heard = threading.Semaphore(0)

    def on_hosts_updated(self, timestamp: float, update_res: HostUpdateResult) -> None:
        self.heard.append(timestamp)
        self.has_heard.release()


def tell(server: KeyValueServer, at: float) -> None:
    driver = KeyValueClient(f"127.0.0.1:{server.port}", SECRET)
    driver.push(
        membership.host_update_box("w7"), json.dumps({"at": at, "change": int(HostUpdateResult.added)}).encode()
    )
    driver.close()


def test_news_are_heard_again_once_the_network_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notification, "_RETRY_S", 0.05)
    monkeypatch.setattr(notification, "_MAX_TRIES", 100)
    monkeypatch.setattr(membership, "_membership", None)
    server = KeyValueServer(SECRET)
    topology = Topology(rendezvous=f"127.0.0.1:{server.port}", secret=SECRET, worker="w7", job_id="j")
    for name, value in {**topology.to_env(), "HOROVOD_ELASTIC": "1"}.items():
        monkeypatch.setenv(name, value)
    manager, state = NotificationManager(), Listener()
    manager.listen(state)
    tell(server, 1.0)
    assert state.has_heard.acquire(timeout=30)
    server.close()
    with KeyValueServer(SECRET, port=server.port) as back:
        # To the worker it is the same store: it has read one message of its box.
        with_one = KeyValueClient(f"127.0.0.1:{back.port}", SECRET)
        assert with_one.push(membership.host_update_box("w7"), b"") == 0
        with_one.close()
        tell(back, 2.0)
        assert state.has_heard.acquire(timeout=30)
    assert state.heard == [1.0, 2.0]
    monkeypatch.setattr(notification, "_MAX_TRIES", 1)
    thread = manager._thread
    assert thread is not None
    thread.join(30)
    membership.membership(topology).close()
