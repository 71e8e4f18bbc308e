"""The addresses of this host, and the first address of another host at which its store answers."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Sequence
from pathlib import Path

from hvd_cluster.errors import AuthenticationError
from hvd_cluster.rendezvous.client import KeyValueClient
from hvd_cluster.topology import join_address

_GET_ADDRESS = 0x8915  # SIOCGIFADDR
#: Seconds after which the next address is tried.
_ATTEMPT_S = 3.0


def host_key() -> str:
    """Equal for two processes of one kernel and network namespace, which can then share memory."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot_id}/{Path('/proc/self/ns/net').stat().st_ino}"


def interface_addresses(names: Sequence[str] = ()) -> list[str]:
    """The IPv4 addresses of this host's interfaces ``names``, all of them by default, the loopback one last."""
    import fcntl

    found: list[str] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for name in names or [name for _, name in socket.if_nameindex()]:
            try:
                answer = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, struct.pack("256s", name.strip().encode()[:15]))
            except OSError:
                continue  # no such interface, or one without an address
            found.append(socket.inet_ntoa(answer[20:24]))
    return sorted(found, key=lambda address: address.startswith("127."))


def first_reachable(addresses: Sequence[str], port: int, secret: bytes, timeout_s: float) -> str:
    """The first of ``addresses`` at which a store answers that holds ``secret``.

    Raises:
        ConnectionError: none did in time; the message has the reason for each address.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        failures: list[str] = []
        for address in addresses:
            left_s = max(0.1, min(_ATTEMPT_S, deadline_s - time.monotonic()))
            try:
                KeyValueClient(join_address(address, port), secret, left_s).close()
                return address
            except AuthenticationError as error:  # another host may have the same address, e.g. loopback
                failures.append(str(error))
            except ConnectionError as error:
                failures.append(str(error))
        if time.monotonic() >= deadline_s:
            if all(address.startswith("127.") for address in addresses):
                failures.append("its host has no IPv4 address except loopback, and hosts connect to each other by IPv4")
            raise ConnectionError("; ".join(dict.fromkeys(failures)))
