"""``-H host:slots,...`` -> the seats of a job. Pure."""

from __future__ import annotations

import re
import socket

from hvd_cluster.launch.placement import Seat

_ADDRESS = "127.0.0.1"


def parse_hosts(text: str) -> list[tuple[str, int]]:
    """``"a:2,b:4"`` as pairs of name and number of slots.

    Raises:
        ValueError: the text has another form.
    """
    hosts = [re.fullmatch(r"([\w.-]+):([1-9]\d*)", part.strip()) for part in text.split(",")]
    if None in hosts:
        raise ValueError(
            f"Invalid host input, please make sure it has format as : worker-0:2,worker-1:2. (It is {text!r}.)"
        )
    return [(match[1], int(match[2])) for match in hosts if match is not None]


def local_seats(num_proc: int, hosts: list[tuple[str, int]] | None = None) -> list[Seat]:
    """Seats for ``num_proc`` workers on this host, which must have enough slots if ``hosts`` states them.

    Raises:
        ValueError: too few slots, a host that is not this one, or no workers.
    """
    if num_proc < 1:
        raise ValueError(f"-np must be at least 1, not {num_proc}")
    if hosts is not None:
        remote = [name for name, _ in hosts if name not in local_names()]
        if remote:
            raise ValueError(f"-H with other hosts ({', '.join(remote)}) is not available in this version")
        slots = sum(count for _, count in hosts)
        if slots < num_proc:
            raise ValueError(f"Requested more processes ({num_proc}) than there are available slots ({slots})")
    return [Seat(index, _ADDRESS, _ADDRESS) for index in range(num_proc)]


def local_names() -> set[str]:
    """Names by which people mean the host that they are on."""
    name = socket.gethostname()
    return {"localhost", "127.0.0.1", name, name.partition(".")[0]}
