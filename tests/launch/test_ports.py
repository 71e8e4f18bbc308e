from __future__ import annotations

import errno
import socket

import pytest

from hvd_cluster.launch.ports import ReservedPort


def test_a_server_with_reuseaddr_can_listen_on_a_reserved_port_and_no_one_else_gets_it() -> None:
    with ReservedPort() as reserved, ReservedPort() as other:
        assert reserved.port != other.port
        with socket.socket() as careless, pytest.raises(OSError, match="in use") as caught:
            careless.bind(("127.0.0.1", reserved.port))
        assert caught.value.errno == errno.EADDRINUSE
        with socket.create_server(("127.0.0.1", reserved.port)) as server:
            socket.create_connection(server.getsockname()).close()
