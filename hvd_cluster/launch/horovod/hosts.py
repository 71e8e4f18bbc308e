"""``horovod.runner.common.util.hosts``: hosts with their slots.

And the assignment of ranks to slots.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from hvd_cluster.launch import hosts
from hvd_cluster.launch.checks import count_problems
from hvd_cluster.launch.placement import Slot, place


@dataclass
class HostInfo:
    """A host."""

    hostname: str
    #: The number of workers that it takes.
    slots: int

    @staticmethod
    def from_string(host_string: str) -> HostInfo:
        """The host of ``"name:slots"``.

        Raises:
            ValueError: the text has another form.
        """
        return parse_hosts(host_string)[0]


@dataclass
class SlotInfo:
    """The slot of one worker.

    Each field is the value of the function of that name in ``horovod.torch``.
    """

    hostname: str
    rank: int
    local_rank: int
    cross_rank: int
    size: int | None = None
    local_size: int | None = None
    cross_size: int | None = None

    def to_response_string(self) -> str:
        """The indices and sizes of the slot, separated by commas.

        They are rank, size, local_rank, local_size, cross_rank and cross_size.
        """
        found = (self.rank, self.size, self.local_rank, self.local_size, self.cross_rank, self.cross_size)
        return ",".join(str(each) for each in found)


def host_hash(salt: str | None = None) -> str:
    """An identifier of this host; it differs for other host names and salts."""
    name = socket.gethostname()
    digest = hashlib.md5(f"{name}-{salt}".encode(), usedforsecurity=False).hexdigest()
    return f"{name.partition('.')[0]}-{digest}"


#: The slot of a worker that an elastic job has removed.
INVALID_SLOT_INFO = SlotInfo("", -1, -1, -1, -1, -1, -1)


def parse_hosts(hosts_string: str) -> list[HostInfo]:
    """``"a:2,b:4"`` as hosts.

    Raises:
        ValueError: the text has another form.
    """
    return [HostInfo(host.name, host.slots) for host in hosts.parse_hosts(hosts_string)]


def parse_hosts_and_slots(hosts_string: str) -> tuple[list[str], dict[str, int]]:
    """The names of the hosts of ``"a:2,b:4"``, and their slots by name."""
    found = hosts.parse_hosts(hosts_string)
    return [host.name for host in found], {host.name: host.slots for host in found}


def parse_host_files(filename: str) -> str:
    """The hosts of a hostfile (lines such as ``host slots=4``) as ``"a:2,b:4"``.

    Raises:
        ValueError: the file cannot be read, or a line has another form.
    """
    return ",".join(f"{host.name}:{host.slots}" for host in hosts.read_hostfile(filename))


def get_host_assignments(
    hosts_: Sequence[HostInfo], min_num_proc: int, max_num_proc: int | None = None
) -> list[SlotInfo]:
    """A slot for each worker, in the order of ranks.

    Ranks are contiguous on each host.

    Args:
        hosts_: the hosts, in the order in which ranks fill them.
        min_num_proc: the number of workers if ``max_num_proc`` is None.
        max_num_proc: use all slots, up to this number.

    Raises:
        ValueError: there are fewer slots than ``min_num_proc``, or a number is not a whole number.
    """
    if wrong := count_problems("min_num_proc", min_num_proc) + count_problems("max_num_proc", max_num_proc):
        raise ValueError("; ".join(wrong))
    named = [hosts.Host(host.hostname, host.slots) for host in hosts_]
    slots = sum(host.slots for host in named)
    count = min_num_proc if max_num_proc is None else max(min_num_proc, min(slots, max_num_proc))
    names = [host.name for host in hosts.fill(named, count) for _ in range(host.slots)]
    return [
        SlotInfo(
            hostname=placement.slot.address,
            rank=placement.rank,
            local_rank=placement.local_rank,
            cross_rank=placement.cross_rank,
            size=placement.size,
            local_size=placement.local_size,
            cross_size=placement.cross_size,
        )
        for placement in place([Slot(index, name, name) for index, name in enumerate(names)])
    ]
