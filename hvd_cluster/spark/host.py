"""The machine that a task runs on: its addresses, and the user's files on it."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Iterable
from pathlib import Path

from hvd_cluster.rendezvous.sockets import LOOPBACK


def addresses(known: Iterable[str] = (), towards: Iterable[str] = ()) -> list[str]:
    """The addresses at which other hosts may reach this one, the likeliest first.

    Loopback addresses come last.

    Args:
        known: names or addresses that the cluster uses for this host. Names that do not resolve are left out.
        towards: names or addresses of other hosts; the addresses on the routes to them are candidates.
    """
    found = [address for name in known for address in _resolve(name)]
    found += [address for name in towards for address in [_interface_towards(name)] if address]
    found += _resolve(socket.gethostname())
    unique = list(dict.fromkeys(found)) or [LOOPBACK]
    return sorted(unique, key=lambda address: ipaddress.ip_address(address).is_loopback)


def resolve_executable(executable: str | None) -> str | None:
    """The path of an executable that the user has named for the tasks.

    A relative path with a directory, such as ``environment/bin/python``, is searched where Spark unpacks
    ``spark.archives``: in the task's working directory, and on a local master in the session's own directory of files.
    """
    if executable is None or "/" not in executable or Path(executable).is_absolute():
        return executable
    from pyspark import SparkFiles

    folders = [Path.cwd()]
    with contextlib.suppress(Exception):  # raised by Spark if there is no such directory
        folders.append(Path(SparkFiles.getRootDirectory()))
    found = [folder / executable for folder in folders if (folder / executable).exists()]
    return str(found[0]) if found else executable


def without_brackets(address: str) -> str:
    """An address for a socket: Spark's settings have those of IPv6 in brackets."""
    return address.removeprefix("[").removesuffix("]")


def _resolve(name: str) -> list[str]:
    try:
        found = socket.getaddrinfo(without_brackets(name), None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found if "%" not in str(entry[4][0])))


def _interface_towards(name: str) -> str:
    """The address of this host on its route to a name; no packet is sent."""
    for address in _resolve(name):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            return str(probe.getsockname()[0])
    return ""
