"""How a connection notices that the machine at its other end has vanished."""

from __future__ import annotations

import socket

#: Seconds after which a host that has vanished without a word counts as gone.
VANISHED_S = 10


def notice_vanishing(sock: socket.socket, unread_s: float = VANISHED_S) -> None:
    """Let reads and writes of a TCP connection fail when its other end has vanished for :data:`VANISHED_S` seconds.

    Args:
        sock: the connection.
        unread_s: seconds for which the other end may be there and read nothing, while there is something to send. To
            Linux that is the same as having vanished (tcp(7), TCP_USER_TIMEOUT), which is then noticed no sooner.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in (("TCP_KEEPIDLE", 4), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(unread_s * 1000))
