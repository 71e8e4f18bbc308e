"""The addresses of this host, and the one at which another host's store answers."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from hvd_cluster.errors import AuthenticationError
from hvd_cluster.rendezvous.client import KeyValueClient
from hvd_cluster.rendezvous.sockets import ANY, IPV6_ADDRESSES
from hvd_cluster.topology import join_address

_GET_ADDRESS = 0x8915  # SIOCGIFADDR
#: Flags of an IPv6 address: IFA_F_DADFAILED, IFA_F_DEPRECATED, IFA_F_TENTATIVE.
_UNUSABLE = 0x08 | 0x20 | 0x40
#: Seconds after which the next address is tried.
_ATTEMPT_S = 3.0


def host_key() -> str:
    """Name this kernel and network namespace, whose processes can share memory.

    Two pods on one machine are two hosts: they share neither the loopback interface nor abstract Unix sockets.
    """
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot_id}/{Path('/proc/self/ns/net').stat().st_ino}"
    except OSError:  # some sandboxes have no such files
        return socket.gethostname()


def pid_namespace() -> str:
    """Name the namespace of process ids that this process is in; empty if unknown."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:  # some sandboxes have no such files
        return ""


def interface_names(nics: str | Iterable[str] | None) -> tuple[str, ...]:
    """The network interfaces in ``nics``: one name, several, or a text with commas."""
    texts = [nics] if isinstance(nics, str) else list(nics or ())
    if isinstance(nics, (set, frozenset)):
        texts = sorted(texts)  # the same first interface on every host
    return tuple(name.strip() for text in texts for name in text.split(",") if name.strip())


def interface_addresses(nics: str | Iterable[str] | None = None) -> list[str]:
    """The addresses of this host's interfaces, the loopback one last.

    ``nics`` selects interfaces, as :func:`interface_names` reads it; None stands for all of them. An interface's IPv4
    address, or its IPv6 addresses if it has none.
    """
    import fcntl

    found: list[str] = []
    ipv6 = _ipv6_addresses()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for name in [name for _, name in socket.if_nameindex()] if nics is None else interface_names(nics):
            try:
                answer = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
            except OSError:  # no such interface, or one without an IPv4 address
                found += ipv6.get(name, [])
            else:
                found.append(socket.inet_ntoa(answer[20:24]))
    return sorted(found, key=lambda address: (address.startswith("127."), ":" in address))


def _ipv6_addresses() -> dict[str, list[str]]:
    """The global IPv6 addresses of each interface that new connections may use.

    Not the link-local ones: they mean something else on each interface, and Gloo cannot use them.
    """
    found: dict[str, list[str]] = {}
    for line in IPV6_ADDRESSES.read_text(encoding="ascii").splitlines() if IPV6_ADDRESSES.exists() else []:
        address, _index, _prefix, scope, flags, name = line.split()
        if int(scope, 16) == 0 and not int(flags, 16) & _UNUSABLE:
            found.setdefault(name, []).append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address)))
    return found


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
                failures.append("its host has no address except loopback and link-local ones")
            raise ConnectionError("; ".join(dict.fromkeys(failures)))


def outward_interfaces() -> dict[str, str]:
    """Interface -> its first address, without the loopback interface."""
    found = {name: addresses[0] for _, name in socket.if_nameindex() if (addresses := interface_addresses([name]))}
    return {name: address for name, address in found.items() if not address.startswith("127.")}


def named(addresses: dict[str, str], wanted: list[str]) -> dict[str, str]:
    """The addresses of the interfaces that the user wants; all if none is named.

    A name may also be a prefix, as in NCCL_SOCKET_IFNAME ("eth" means eth0 and eth1). Hosts may have different names:
    list all of them.
    """
    if not wanted:
        return dict(addresses)
    exact = {name: address for name, address in addresses.items() if name in wanted}
    return exact or {n: address for n, address in addresses.items() if any(n.startswith(prefix) for prefix in wanted)}


def listening_addresses(wanted: list[str]) -> list[str]:
    """The addresses on which a service for several hosts listens.

    They are those of the wanted interfaces if this host has any. Otherwise it listens on all interfaces, because the
    others may connect through any of them.
    """
    there = named(outward_interfaces(), wanted) if wanted else {}
    return list(there.values()) or [ANY]
