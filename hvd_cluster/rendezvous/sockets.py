"""TCP sockets: listening on several addresses, a reserved port, and keepalive."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

LOOPBACK = "127.0.0.1"
#: Every interface of this host; for :func:`listen`, by IPv4 and IPv6.
ANY = "0.0.0.0"
_ANY_IPV6 = "::"
#: A line for each IPv6 address of this host.
IPV6_ADDRESSES = Path("/proc/net/if_inet6")
_BACKLOG = 512
#: A port that is free on one address is in use on another about once in a hundred times.
_MAX_TRIES = 20


def listen(hosts: Sequence[str], port: int = 0) -> list[socket.socket]:
    """One socket for each of ``hosts``, all with the same port number.

    Args:
        hosts: addresses of this host; :data:`ANY` has a second socket if this host has an IPv6 address. If one of them
            is not an address of an interface (a router translates it), it is as with :data:`ANY`.
        port: the port; 0 takes one that is free on all of them.

    Raises:
        OSError: no port can be opened.
    """
    everywhere = [ANY, _ANY_IPV6] if IPV6_ADDRESSES.exists() and IPV6_ADDRESSES.read_bytes() else [ANY]
    hosts = everywhere if ANY in hosts else list(dict.fromkeys(hosts))
    for left in reversed(range(_MAX_TRIES)):
        with contextlib.ExitStack() as on_failure:
            found: list[socket.socket] = []
            try:
                for host in hosts:
                    number = found[0].getsockname()[1] if found else port
                    family = socket.AF_INET6 if ":" in host else socket.AF_INET
                    found.append(socket.create_server((host, number), family=family, backlog=_BACKLOG))
                    on_failure.callback(found[-1].close)
            except OSError as error:
                if error.errno == errno.EADDRNOTAVAIL and hosts != everywhere:
                    hosts = everywhere
                    continue
                if error.errno == errno.EADDRINUSE and found and port == 0 and left:
                    continue
                raise
            on_failure.pop_all()
            return found
    raise AssertionError("the last try either returns or raises")


class Closing:
    """A context manager that closes itself at the end."""

    def close(self) -> None:
        """Release everything."""
        raise NotImplementedError

    def __enter__(self: T) -> T:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class ReservedPort(Closing):
    """A free port that the system gives to no other process until it is closed.

    Only a process that asks for this very port can get it. It is a bound socket that does not listen, with
    SO_REUSEADDR. Linux lets a server with SO_REUSEADDR (such as torch's TCPStore) bind the same port and listen, and no
    other socket.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((host, 0))
        self.port: int = self._socket.getsockname()[1]

    def close(self) -> None:
        """Release the port."""
        self._socket.close()


#: Seconds of silence after which the kernel probes the other end. Firewalls drop a silent connection after some minutes
#: (AWS 350 s, Azure 240 s).
IDLE_S = 45
#: Seconds between two probes, and the number of unanswered ones after which the connection counts as broken.
_INTERVAL_S, _NUM_PROBES = 15, 8

#: Seconds after which :func:`detect_dead_host` reports a host that does not answer.
DEAD_HOST_S = 10


def keep_alive(sock: socket.socket) -> None:
    """Keep a silent TCP connection open through routers and firewalls.

    Small messages are sent at once. Unlike :func:`detect_dead_host`, it tolerates a network that is down for two
    minutes, and a peer that does not read.
    """
    _enable(sock, IDLE_S, _INTERVAL_S, _NUM_PROBES)


def detect_dead_host(sock: socket.socket, unread_s: float = DEAD_HOST_S) -> None:
    """Let a TCP connection fail when its other end has not answered for a time.

    The time is :data:`DEAD_HOST_S`. Small messages are sent at once.

    Args:
        unread_s: seconds for which the other end may stay alive without reading while there is data to send. Linux does
            not distinguish that from a dead host (tcp(7), TCP_USER_TIMEOUT), so a dead host is not detected sooner.
    """
    _enable(sock, 4, 2, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(unread_s * 1000))


def _enable(sock: socket.socket, idle_s: int, interval_s: int, num_probes: int) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, num_probes)
