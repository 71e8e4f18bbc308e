"""This host's addresses.

``horovod.runner.util.network`` and ``horovod.runner.common.util.network``.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable

from hvd_cluster.launch.hosts import is_local
from hvd_cluster.rendezvous.addresses import outward_interfaces
from hvd_cluster.rendezvous.sockets import LOOPBACK


def get_local_host_addresses() -> list[str]:
    """This host's addresses, including the loopback address."""
    return [*outward_interfaces().values(), LOOPBACK]


def get_local_host_intfs() -> set[str]:
    """The names of this host's network interfaces."""
    return {name for _, name in socket.if_nameindex()}


def filter_local_addresses(all_host_names: Iterable[str]) -> list[str]:
    """The names that do not mean this host."""
    return [name for name in all_host_names if not is_local(name)]


def resolve_host_address(host_name: str) -> str | None:
    """An IPv4 address of a host; None if its name cannot be resolved."""
    try:
        return socket.gethostbyname(host_name)
    except OSError:
        return None


def get_driver_ip(nics: Iterable[str] | None = None) -> str:
    """This host's address on one of ``nics``, or on any interface.

    Raises:
        RuntimeError: it has none; the message lists the interfaces that have one.
    """
    found = {**outward_interfaces(), "lo": LOOPBACK}
    wanted = [name for name in ([nics] if isinstance(nics, str) else nics or found) if name in found]
    if not wanted:
        raise RuntimeError(f"no address on nics={nics!r}; these interfaces have one: {', '.join(found)}")
    return found[wanted[0]]
