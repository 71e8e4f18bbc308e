"""The Gloo transport, between ranks that are threads here; processes are in tests/torch."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
import torch

from hvd_cluster.engine.signature import ReduceOp
from hvd_cluster.engine.transports.gloo import GlooTransport
from hvd_cluster.rendezvous.client import KeyValueClient
from hvd_cluster.rendezvous.server import KeyValueServer
from hvd_cluster.topology import join_address

SECRET = b"s" * 16


def test_an_abort_ends_the_groups_connections_and_no_other_of_the_process() -> None:
    users: list[tuple[socket.socket, socket.socket]] = []
    is_built = threading.Event()

    def connect_meanwhile() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            while not is_built.is_set() and len(users) < 200:
                client = socket.create_connection(listener.getsockname())
                users.append((client, listener.accept()[0]))

    def build(index: int) -> GlooTransport:
        with closing(KeyValueClient(join_address("127.0.0.1", server.port), SECRET)) as client:
            return GlooTransport(client, "group", index=index, ranks=(0, 1), host="127.0.0.1", timeout_s=20)

    with KeyValueServer(SECRET, "127.0.0.1") as server, ThreadPoolExecutor(3) as pool:
        user = pool.submit(connect_meanwhile)
        transports = list(pool.map(build, range(2)))
        is_built.set()
        user.result()
        work = transports[0].allreduce(torch.ones(4), ReduceOp.SUM)
        transports[0].abort()
        with pytest.raises(RuntimeError):
            work.result()
    assert users
    for one, other in users:
        one.sendall(b"x")
        assert other.recv(1) == b"x"
        one.close()
        other.close()
    for transport in transports:
        transport.close()
