"""The network interfaces of this host, and their IPv4 addresses."""

from __future__ import annotations

import socket

from hvd_cluster.rendezvous.addresses import interface_addresses
from hvd_cluster.rendezvous.listening import ANY


def outward_interfaces() -> dict[str, str]:
    """Interface -> its IPv4 address, for interfaces that have one, without the loopback interface."""
    found = {name: addresses[0] for _, name in socket.if_nameindex() if (addresses := interface_addresses([name]))}
    return {name: address for name, address in found.items() if not address.startswith("127.")}


def named(addresses: dict[str, str], wanted: list[str]) -> dict[str, str]:
    """The ``addresses`` whose interfaces the user wants; all of them if the user named none.

    A name may also be a prefix, as in NCCL_SOCKET_IFNAME ("eth" means eth0 and eth1). Hosts may have different names:
    list all of them.
    """
    if not wanted:
        return dict(addresses)
    exact = {name: address for name, address in addresses.items() if name in wanted}
    return exact or {n: address for n, address in addresses.items() if any(n.startswith(prefix) for prefix in wanted)}


def listening_addresses(wanted: list[str]) -> list[str]:
    """The addresses on which a service for several hosts listens: those of the wanted interfaces if this host has any.

    Otherwise it listens on all interfaces, because the others may connect through any of them.
    """
    there = named(outward_interfaces(), wanted) if wanted else {}
    return list(there.values()) or [ANY]
