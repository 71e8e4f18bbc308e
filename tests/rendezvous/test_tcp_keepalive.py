"""A connection that is silent for long is not forgotten on its way."""

from __future__ import annotations

import socket

from hvd_cluster.rendezvous.tcp_keepalive import keep_alive

#: The shortest time after which a common firewall forgets a silent connection: Azure's load balancer.
FORGOTTEN_S = 240


def test_the_kernel_speaks_before_a_firewall_forgets_the_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as sock:
        keep_alive(sock)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert 2 * sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) < FORGOTTEN_S
        # A network that is away for a moment costs nothing.
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0
