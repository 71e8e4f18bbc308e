"""The hosts that a user names, with their slots."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hvd_cluster.launch.checks import count_problems
from hvd_cluster.rendezvous.sockets import LOOPBACK

_NAME = r"(?:[\w.-]+@)?(?:[\w.-]+|\[[0-9a-fA-F:.]+\])"
_HOST = re.compile(rf"({_NAME}):([1-9]\d*)")


@dataclass(frozen=True)
class Host:
    """A machine, as the user named it."""

    #: A name or an address, or ``user@name``; passed to ssh.
    name: str
    #: The number of workers that it takes.
    slots: int

    def __post_init__(self) -> None:
        if wrong := count_problems("slots", self.slots, 0):  # 0: discovered, but full
            raise ValueError(f"host {self.name}: {wrong[0]}")

    @property
    def address(self) -> str:
        """The name without the user."""
        return self.name.rpartition("@")[2].strip("[]")


def parse_hosts(text: str) -> list[Host]:
    """Parse ``"a:2,b:4"``.

    Raises:
        ValueError: the text has another form.
    """
    hosts = [_HOST.fullmatch(part.strip()) for part in text.split(",")]
    if None in hosts:
        raise ValueError(
            f"Invalid host input, please make sure it has format as : worker-0:2,worker-1:2. (It is {text!r}.)"
        )
    return merged([Host(match[1], int(match[2])) for match in hosts if match is not None])


def parse_hostfile(text: str, name: str = "the hostfile", slots: int = 1) -> list[Host]:
    """Parse a hostfile.

    A line is ``host slots=4`` as in Open MPI, ``host:4`` as in MPICH, or just ``host``.

    Args:
        text: the contents; everything after a # is a comment.
        slots: slots of a host for which the file has no number.

    Raises:
        ValueError: lines have another form; the message lists all of them.
    """
    hosts: list[Host] = []
    wrong: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        pair = _HOST.fullmatch(words[0])
        stated = [word.partition("=")[2] for word in words[1:] if word.startswith("slots=")]
        rest = [word for word in words[1:] if not re.fullmatch(r"(slots|max[-_]slots)=[1-9]\d*", word)]
        if rest or (pair and stated) or not (pair or _is_name(words[0])):
            wrong.append(f"line {number}: {line.strip()!r}")
        else:
            hosts.append(Host(pair[1], int(pair[2])) if pair else Host(words[0], int(stated[0]) if stated else slots))
    if wrong:
        raise ValueError(f"{name} has lines that are not like 'host slots=4' or 'host:4': {'; '.join(wrong)}")
    if not hosts:
        raise ValueError(f"{name} has no hosts")
    return merged(hosts)


def _is_name(word: str) -> bool:
    """Whether a word is a host's name or address, perhaps after a user's name.

    With colons, it is an IPv6 address only.
    """
    user, at, address = word.rpartition("@")
    with contextlib.suppress(ValueError):
        ipaddress.IPv6Address(address)
        word = f"{user}{at}[{address}]"
    return bool(re.fullmatch(_NAME, word))


def read_hostfile(path: str, slots: int = 1) -> list[Host]:
    """The hosts of a hostfile; see :func:`parse_hostfile`.

    Raises:
        ValueError: the file cannot be read, or lines have another form.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")  # editors on Windows write a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the hostfile {path} cannot be read: {error}") from error
    return parse_hostfile(text, f"the hostfile {path}", slots)


def merged(hosts: Sequence[Host]) -> list[Host]:
    """Each host once, in the order of first mention, with the sum of its slots."""
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.name] = slots.get(host.name, 0) + host.slots
    return [Host(name, count) for name, count in slots.items()]


def fill(hosts: Sequence[Host], num_proc: int) -> list[Host]:
    """The first ``num_proc`` slots, host by host, without hosts that get no worker.

    Raises:
        ValueError: there are too few slots, or ``num_proc`` is less than 1.
    """
    if wrong := count_problems("-np", num_proc):
        raise ValueError(wrong[0])
    slots = sum(host.slots for host in hosts)
    if slots < num_proc:
        raise ValueError(f"Requested more processes ({num_proc}) than there are available slots ({slots})")
    taken: list[Host] = []
    for host in hosts:
        count = min(host.slots, num_proc - sum(other.slots for other in taken))
        if count:
            taken.append(Host(host.name, count))
    return taken


def is_local(name: str) -> bool:
    """Whether ``name`` is a name or an address of the host that this process runs on.

    A name that cannot be resolved here is not this host's: ssh may know it.
    """
    host = name.rpartition("@")[2].strip("[]")
    if "@" in name:
        return False  # another user, even if on this host: use ssh
    if host in local_names():
        return True
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(_is_own(family, str(address[0])) for family, _, _, _, address in found)


def local_names() -> set[str]:
    """Common names of the host that this process runs on."""
    name = socket.gethostname()
    return {"localhost", LOOPBACK, "::1", name, name.partition(".")[0]}


def _is_own(family: int, address: str) -> bool:
    """Whether the address belongs to this host.

    The kernel binds sockets to the host's own addresses only.
    """
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError as error:
        return error.errno not in (errno.EADDRNOTAVAIL, errno.EINVAL, errno.EAFNOSUPPORT)
    return True
