"""The machine that a task runs on: what tells it from others, and how others reach it."""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import socket
from collections.abc import Iterable
from pathlib import Path

LOOPBACK = "127.0.0.1"
#: Every interface of this host; without the job's secret nobody gets further than a handshake.
ANY = "0.0.0.0"


def machine_key() -> str:
    """A text that two processes share if and only if they are on one machine and in one network namespace.

    Two executors on one machine are one host; two pods on one machine are two, because neither loopback nor an
    abstract Unix socket joins them.
    """
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):  # absent in some sandboxes
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
    with contextlib.suppress(OSError):
        parts.append(str(Path("/proc/self/ns/net").readlink()))
    digest = hashlib.sha256("|".join(parts).encode()).hexdigest()[:16]
    return f"{parts[0].split('.')[0]}-{digest}"


def addresses(known: Iterable[str] = (), towards: Iterable[str] = ()) -> list[str]:
    """The addresses under which other hosts may reach this one, the likeliest first; loopback ones come last.

    Args:
        known: names or addresses that the cluster uses for this host. A name that does not resolve is left out.
        towards: names or addresses of other hosts; the interface that leads to each of them is a candidate.
    """
    found = [address for name in known for address in _resolve(name)]
    found += [address for name in towards for address in [_interface_towards(name)] if address]
    found += _resolve(socket.gethostname())
    unique = list(dict.fromkeys(found)) or [LOOPBACK]
    return sorted(unique, key=lambda address: ipaddress.ip_address(address).is_loopback)


def resolve_executable(executable: str | None) -> str | None:
    """Where an executable is that a user has named for the tasks.

    A relative path with a folder in it, as ``environment/bin/python``, is looked for where Spark unpacks
    ``spark.archives``: the task's working directory, and on a local master the session's own folder of files.
    """
    if executable is None or "/" not in executable or Path(executable).is_absolute():
        return executable
    from pyspark import SparkFiles

    folders = [Path.cwd()]
    with contextlib.suppress(Exception):  # Spark's own: there may be no folder of files
        folders.append(Path(SparkFiles.getRootDirectory()))
    found = [folder / executable for folder in folders if (folder / executable).exists()]
    return str(found[0]) if found else executable


def _resolve(name: str) -> list[str]:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found if "%" not in str(entry[4][0])))


def _interface_towards(name: str) -> str:
    """The address of this host from which packets to ``name`` leave; nothing is sent to find out."""
    for address in _resolve(name):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            return str(probe.getsockname()[0])
    return ""
