"""Finds the hosts that are available now."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import IO

from hvd_cluster.launch.hosts import Host

_LINE = re.compile(r"((?:[\w.-]+@)?(?:[\w.-]+|\[[0-9a-fA-F:.]+\]))(?::(\d+))?")
_SCRIPT_TIMEOUT_S = 60.0


class HostDiscovery(ABC):
    """Finds the hosts of an elastic job repeatedly."""

    @abstractmethod
    def find_available_hosts_and_slots(self) -> Mapping[str, int]:
        """Host -> number of slots, now.

        Raises:
            OSError, ValueError: the discovery has failed this time.
        """

    def give_up(self) -> None:  # noqa: B027 - most have nothing to interrupt
        """Note that the job ends.

        A discovery that runs in another thread should return soon, with any result.
        """


class FixedHosts(HostDiscovery):
    """The hosts that the user has named."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self._hosts = {host.name: host.slots for host in hosts}

    def find_available_hosts_and_slots(self) -> Mapping[str, int]:
        return dict(self._hosts)


class HostDiscoveryScript(HostDiscovery):
    """Runs a user's program that prints ``host`` or ``host:slots`` lines.

    Args:
        discovery_script: the program with its arguments, for a shell.
        default_slots: slots of a host that is printed without a number.
    """

    def __init__(self, discovery_script: str, default_slots: int = 1) -> None:
        self._script = discovery_script
        self._default_slots = default_slots
        self._lock = threading.Lock()
        self._running: subprocess.Popen[bytes] | None = None
        self._given_up = False

    def find_available_hosts_and_slots(self) -> Mapping[str, int]:
        # Files, and not pipes, whose end would come only with that of what the script leaves running.
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            with self._lock:
                if self._given_up:
                    raise ValueError("the job ends")
                # In a new session, so that the processes that the script starts can be killed with it.
                process = self._running = subprocess.Popen(
                    ["/bin/sh", "-c", self._script],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=errors,
                    start_new_session=True,
                )
            try:
                exit_code = process.wait(_SCRIPT_TIMEOUT_S)
            except subprocess.TimeoutExpired as error:
                raise ValueError(f"{self._script} did not exit within {_SCRIPT_TIMEOUT_S:g} s") from error
            finally:  # also after an interrupt
                self._end()
            if exit_code != 0:
                raise ValueError(f"{self._script} ended with exit code {exit_code}: {_text(errors).strip()[-500:]}")
            return parse_found(_text(output), self._default_slots)

    def give_up(self) -> None:
        self._given_up = True
        self._end()

    def _end(self) -> None:
        """Kill the script if it is running."""
        with self._lock:
            process, self._running = self._running, None
            if process is not None and process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def parse_found(text: str, default_slots: int) -> dict[str, int]:
    """Parse the output of a discovery script to host -> slots, in order. Pure.

    Hosts without slots are left out.

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
