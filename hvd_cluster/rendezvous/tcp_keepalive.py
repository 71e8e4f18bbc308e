"""TCP keepalive: connections that stay open through firewalls, and connections that detect a dead host."""

from __future__ import annotations

import socket

#: Seconds of silence after which the kernel probes the other end. Firewalls drop a silent connection after some minutes
#: (AWS 350 s, Azure 240 s).
IDLE_S = 45
#: Seconds between two probes, and the number of unanswered ones after which the connection counts as broken.
_INTERVAL_S, _NUM_PROBES = 15, 8

#: Seconds after which :func:`detect_dead_host` reports a host that does not answer.
DEAD_HOST_S = 10


def keep_alive(sock: socket.socket) -> None:
    """Keep a silent TCP connection open through routers and firewalls.

    Unlike :func:`detect_dead_host`, it tolerates a network that is down for two minutes, and a peer that does not read.
    """
    _enable(sock, IDLE_S, _INTERVAL_S, _NUM_PROBES)


def detect_dead_host(sock: socket.socket, unread_s: float = DEAD_HOST_S) -> None:
    """Let reads and writes of a TCP connection fail when its other end has not answered for :data:`DEAD_HOST_S`.

    Args:
        sock: the connection.
        unread_s: seconds for which the other end may stay alive without reading while there is data to send. Linux does
            not distinguish that from a dead host (tcp(7), TCP_USER_TIMEOUT), so a dead host is not detected sooner.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _enable(sock, 4, 2, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(unread_s * 1000))


def _enable(sock: socket.socket, idle_s: int, interval_s: int, num_probes: int) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, num_probes)
