"""Which hosts are there now?"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import subprocess
import threading
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

    def give_up(self) -> None:  # noqa: B027 - most have nothing to cut short
        """The job ends: a look that another thread is at should come back soon, whatever it finds."""


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
        self._lock = threading.Lock()
        self._running: subprocess.Popen[str] | None = None
        self._given_up = False

    def find_available_hosts_and_slots(self) -> Mapping[str, int]:
        with self._lock:
            if self._given_up:
                raise ValueError("the job ends")
            # A session of its own, so that what the script has started can be ended with it.
            process = self._running = subprocess.Popen(
                ["/bin/sh", "-c", self._script],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        with process:
            try:
                output, errors = process.communicate(timeout=_SCRIPT_TIMEOUT_S)
            except subprocess.TimeoutExpired as error:
                raise ValueError(f"{self._script} did not end within {_SCRIPT_TIMEOUT_S:g} s") from error
            finally:  # after an interrupt too: it is not waited for
                self._end()
        if process.returncode != 0:
            raise ValueError(f"{self._script} ended with exit code {process.returncode}: {errors.strip()[-500:]}")
        return parse_found(output, self._default_slots)

    def give_up(self) -> None:
        self._given_up = True
        self._end()

    def _end(self) -> None:
        """End the script where it runs."""
        with self._lock:
            process, self._running = self._running, None
            if process is not None and process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


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
