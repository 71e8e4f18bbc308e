"""Which hosts are there now?"""

from __future__ import annotations

import logging
import re
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from hvd_cluster.launch.hosts import Host

logger = logging.getLogger(__name__)

_LINE = re.compile(r"((?:[\w.-]+@)?(?:[\w.-]+|\[[0-9a-fA-F:.]+\]))(?::(\d+))?")
_SCRIPT_TIMEOUT_S = 60.0


class HostDiscovery(ABC):
    """Finds the hosts of an elastic job, again and again."""

    @abstractmethod
    def find_available_hosts_and_slots(self) -> Mapping[str, int]:
        """Host -> number of slots, now.

        Raises:
            OSError, ValueError: they cannot be found this time.
        """


class FixedHosts(HostDiscovery):
    """Hosts that the user has named."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self._hosts = {host.name: host.slots for host in hosts}

    def find_available_hosts_and_slots(self) -> Mapping[str, int]:
        return dict(self._hosts)


class HostDiscoveryScript(HostDiscovery):
    """What a program of the user's prints: ``host`` or ``host:slots``, one a line.

    Args:
        discovery_script: the program with its arguments, for a shell.
        default_slots: slots of a host for which it states none.
    """

    def __init__(self, discovery_script: str, default_slots: int = 1) -> None:
        self._script = discovery_script
        self._default_slots = default_slots

    def find_available_hosts_and_slots(self) -> Mapping[str, int]:
        try:
            done = subprocess.run(
                ["/bin/sh", "-c", self._script],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_SCRIPT_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise ValueError(f"{self._script} did not end within {_SCRIPT_TIMEOUT_S:g} s") from error
        if done.returncode != 0:
            raise ValueError(f"{self._script} ended with exit code {done.returncode}: {done.stderr.strip()[-500:]}")
        return parse_found(done.stdout, self._default_slots)


def parse_found(text: str, default_slots: int) -> dict[str, int]:
    """The lines of a discovery script as host -> slots, in their order; hosts with no slots are left out. Pure.

    Raises:
        ValueError: a line has another form.
    """
    found: dict[str, int] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        match = _LINE.fullmatch(line)
        if match is None:
            raise ValueError(f"the discovery script printed {line!r}, which is neither 'host' nor 'host:slots'")
        found[match[1]] = default_slots if match[2] is None else int(match[2])
    return {host: slots for host, slots in found.items() if slots}
