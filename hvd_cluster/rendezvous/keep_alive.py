"""How a connection that may be silent for hours stays known to the routers and firewalls on its way."""

from __future__ import annotations

import socket

#: Seconds of silence after which the kernel asks the other end for a sign of life. Firewalls forget a silent connection
#: after some minutes (AWS 350 s, Azure 240 s).
IDLE_S = 45
#: Seconds between two such questions, and how many go unanswered until the connection counts as broken.
_BETWEEN_S, _NUM_QUESTIONS = 15, 8


def keep_alive(sock: socket.socket) -> None:
    """Let a silent TCP connection say something now and then.

    Unlike :func:`hvd_cluster.rendezvous.vanishing.notice_vanishing` it bears a network that is away for two minutes,
    and a peer that reads nothing.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", IDLE_S), ("TCP_KEEPINTVL", _BETWEEN_S), ("TCP_KEEPCNT", _NUM_QUESTIONS)):
        sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
