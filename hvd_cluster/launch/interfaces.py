"""The network interfaces of this host, and their IPv4 addresses."""

from __future__ import annotations

import fcntl
import socket
import struct

from hvd_cluster.rendezvous.listening import ANY

_GET_ADDRESS = 0x8915  # SIOCGIFADDR


def outward_interfaces() -> dict[str, str]:
    """Interface -> its IPv4 address, for those that have one; the loopback is left out."""
    found: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # it has no IPv4 address
            found[name] = socket.inet_ntoa(answer[20:24])
    return {name: address for name, address in found.items() if not address.startswith("127.")}


def named(addresses: dict[str, str], wanted: list[str]) -> dict[str, str]:
    """Those of ``addresses`` whose interface the user wants; all where no wish was given.

    A wish is a name, or the beginning of one, as NCCL_SOCKET_IFNAME has it ("eth" means eth0 and eth1); hosts need not
    have equal names: list them all.
    """
    if not wanted:
        return dict(addresses)
    exact = {name: address for name, address in addresses.items() if name in wanted}
    return exact or {n: address for n, address in addresses.items() if any(n.startswith(wish) for wish in wanted)}


def listening_addresses(wanted: list[str]) -> list[str]:
    """Where a service of a job over several hosts listens: at the interfaces that the user wants, where it has them.

    Where nobody says by which interface the others come, they may come by any.
    """
    there = named(outward_interfaces(), wanted) if wanted else {}
    return list(there.values()) or [ANY]
