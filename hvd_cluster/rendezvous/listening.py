"""Listening sockets on several addresses with one port number."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Sequence

LOOPBACK = "127.0.0.1"
#: Every interface of this host.
ANY = "0.0.0.0"
_BACKLOG = 512
#: A port that is free on one address is in use on another about once in a hundred times.
_MAX_TRIES = 20


def listen(hosts: Sequence[str], port: int = 0) -> list[socket.socket]:
    """One socket for each of ``hosts``, all with the same port number.

    Args:
        hosts: addresses of this host. If one of them is not an address of an interface (a router translates it), the
            socket listens on all interfaces.
        port: the port; 0 takes one that is free on all of them.

    Raises:
        OSError: no port can be opened.
    """
    hosts = list(dict.fromkeys(hosts))
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
                if error.errno == errno.EADDRNOTAVAIL and hosts != [ANY]:
                    hosts = [ANY]
                    continue
                if error.errno == errno.EADDRINUSE and found and port == 0 and left:
                    continue
                raise
            on_failure.pop_all()
            return found
    raise AssertionError("the last try either returns or raises")
