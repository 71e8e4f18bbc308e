"""The usable hosts of an elastic job: discovered, connected, and not blacklisted."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from hvd_cluster.errors import LaunchError
from hvd_cluster.launch.elastic.discovery import HostDiscovery
from hvd_cluster.launch.fleet import Fleet
from hvd_cluster.launch.hosts import Host

logger = logging.getLogger(__name__)

#: Seconds until a host that could not be reached is tried again; it may be starting.
_RETRY_S = 10.0
#: Seconds that the hosts of the first discovery get to connect before the job starts without those that have not.
_FIRST_WAIT_S = 10.0
#: Seconds in which a host answers that is connected already.
_CONNECTED_S = 0.1


class HostManager:
    """Discovers hosts in a thread of its own, and connects to them."""

    def __init__(
        self,
        discovery: HostDiscovery,
        fleet: Fleet,
        cooldown_range_s: tuple[float, float] | None,
        interval_s: float,
        on_change: Callable[[], None],
    ) -> None:
        self._discovery = discovery
        self._fleet = fleet
        self._blacklist = Blacklist(cooldown_range_s, random.random)
        self._interval_s = interval_s
        self._on_change = on_change
        self._lock = threading.Lock()
        self._hosts: dict[str, int] = {}  # in the order of their first appearance
        self._try_at_s: dict[str, float] = {}
        #: Connections that :meth:`Fleet.add` is making.
        self._pending: dict[str, Future[str]] = {}
        # It has a thread for each of the hosts that do not answer, so that the others do not wait for them.
        self._pool = ThreadPoolExecutor(max_workers=256, thread_name_prefix="hvd-connect")
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hvd-discovery", daemon=True)

    def start(self) -> None:
        """Run the discovery once now, and then in the thread.

        Waits for a host, and a short time for the others.

        Raises:
            LaunchError: the first discovery fails, so the script is probably wrong.
        """
        try:
            found = self._discovery.find_available_hosts_and_slots()
        except (OSError, ValueError) as error:
            raise LaunchError(f"the hosts cannot be discovered: {error}") from error
        self._connect(found)
        wait(self._pending.values(), _FIRST_WAIT_S)
        self._publish(found)
        while not self._hosts and self._pending:
            wait(self._pending.values(), return_when=FIRST_COMPLETED)
            self._publish(found)
        self._thread.start()

    def close(self) -> None:
        """Stop the discovery, also one that is running.

        The fleet connects to no more hosts afterwards.
        """
        self._stopped.set()
        self._discovery.give_up()
        self._fleet.give_up()
        if self._thread.is_alive():
            self._thread.join()
        self._pool.shutdown(cancel_futures=True)

    def usable(self) -> dict[str, int]:
        """Host -> slots, in the order in which they were found.

        Lost hosts are left out until they are reached again.
        """
        now_s = time.monotonic()
        with self._lock:
            kept = {host: n for host, n in self._hosts.items() if not self._blacklist.holds(host, now_s)}
        unprobed = self._fleet.unprobed()
        return {host: slots for host, slots in kept.items() if not self._fleet.is_lost(host) and host not in unprobed}

    def blacklisted(self) -> frozenset[str]:
        """The excluded hosts, whether they are still available or not."""
        now_s = time.monotonic()
        with self._lock:
            return frozenset(host for host in self._blacklist.hosts() if self._blacklist.holds(host, now_s))

    def fail(self, host: str) -> None:
        """A worker on ``host`` has failed: exclude the host."""
        with self._lock:
            left_s = self._blacklist.add(host, time.monotonic())
        if left_s is None or left_s > 0:
            how_long = "any more" if left_s is None else f"for {left_s:.1f} s"
            logger.warning("host %s takes no new workers %s", host, how_long)

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_s):
            try:
                found = self._discovery.find_available_hosts_and_slots()
                self._connect(found)
                wait(self._pending.values(), _CONNECTED_S)
                self._publish(found)
            except Exception as error:  # noqa: BLE001 - from the user's own discovery; the next one may succeed
                if self._stopped.is_set():
                    return
                logger.warning("the hosts could not be discovered this time: %s: %s", type(error).__name__, error)

    def _connect(self, found: Mapping[str, int]) -> None:
        """Have the pool connect the hosts that are not being connected.

        An existing connection costs nothing.
        """
        now_s = time.monotonic()
        with self._lock:
            free = [Host(name, slots) for name, slots in found.items() if not self._blacklist.holds(name, now_s)]
        for host in free:
            if host.name not in self._pending and self._try_at_s.get(host.name, 0.0) <= now_s:
                self._pending[host.name] = self._pool.submit(self._fleet.add, host)

    def _publish(self, found: Mapping[str, int]) -> None:
        """Make the hosts usable whose connections are finished.

        Others remain pending, and delay nothing.
        """
        now_s = time.monotonic()
        finished = {name: _reason(future) for name, future in self._pending.items() if future.done()}
        for name in finished:
            del self._pending[name]
        broken = {name: why for name, why in finished.items() if why and name in found}
        # A host that is reached again is also new: no worker of the job remains on it.
        unprobed = self._fleet.unprobed() - self._pending.keys()
        if unprobed or any(name not in self._hosts for name, why in finished.items() if not why):
            settled = self._hosts.keys() - unprobed - self._pending.keys()
            broken |= {name: why for name, why in self._fleet.probe().items() if name not in settled}
        if self._stopped.is_set():
            return
        for name, why in broken.items():
            logger.warning("host %s cannot be used; trying again in %g s: %s", name, _RETRY_S, why)
            self._try_at_s[name] = time.monotonic() + _RETRY_S
        late = {name for name, at_s in self._try_at_s.items() if at_s > now_s}
        connected = self._hosts.keys() | finished.keys()
        with self._lock:
            before = dict(self._hosts)
            order = [*(name for name in before if name in found), *(name for name in found if name not in before)]
            self._hosts = {name: found[name] for name in order if name in connected and name not in late}
            changed = before != self._hosts
        if changed:
            logger.info("hosts: %s", ", ".join(f"{name}:{slots}" for name, slots in self._hosts.items()) or "none")
        self._on_change()


def _reason(connecting: Future[str]) -> str:
    """Why a host could not be connected; empty if it was."""
    error = connecting.exception()
    return connecting.result() if error is None else f"{type(error).__name__}: {error}"


@dataclass
class _Entry:
    num_failures: int
    #: When the host may be used again; None for never.
    until_s: float | None


class Blacklist:
    """Excludes failed hosts, forever or for a time that doubles with each failure.

    Args:
        cooldown_range_s: shortest and longest time, in seconds; None for forever.
        random: returns a number between 0 and 1, so that hosts that failed together are not all used again at once.
    """

    def __init__(self, cooldown_range_s: tuple[float, float] | None, random: Callable[[], float]) -> None:
        self._range_s = cooldown_range_s
        self._random = random
        self._entries: dict[str, _Entry] = {}

    def add(self, host: str, now_s: float) -> float | None:
        """Record a failure of a host; return the seconds for which it is excluded.

        None means forever. Several failures while the host is excluded count as one: when a host fails, all its workers
        fail.
        """
        entry = self._entries.setdefault(host, _Entry(0, 0.0))
        if entry.until_s is not None and entry.until_s <= now_s:
            entry.until_s = self._until(entry.num_failures, now_s)
            entry.num_failures += 1
        return None if entry.until_s is None else entry.until_s - now_s

    def holds(self, host: str, now_s: float) -> bool:
        """Whether ``host`` is excluded."""
        entry = self._entries.get(host)
        return entry is not None and (entry.until_s is None or entry.until_s > now_s)

    def hosts(self) -> list[str]:
        """All hosts that have ever failed."""
        return list(self._entries)

    def _until(self, num_failures: int, now_s: float) -> float | None:
        if self._range_s is None:
            return None
        low_s, high_s = self._range_s
        delay_s = low_s * 2.0 ** min(num_failures, 30) + self._random() * low_s
        return now_s + min(max(delay_s, low_s), high_s)
