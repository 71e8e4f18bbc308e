"""The driver's notifications that the hosts have changed.

A thread receives them, and rank 0's are spread to all ranks.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import weakref

import torch

from hvd_cluster.elastic.state import HostUpdateResult, State
from hvd_cluster.engine.process_sets import global_process_set
from hvd_cluster.engine.signature import Kind
from hvd_cluster.engine.submission import Collective
from hvd_cluster.rendezvous.client import KeyValueMailbox
from hvd_cluster.rendezvous.membership import membership
from hvd_cluster.settings import Settings
from hvd_cluster.topology import Topology

logger = logging.getLogger(__name__)

_READ_TIMEOUT_S = 3600.0
#: A network may be down for some minutes without affecting the training.
_RETRY_S, _MAX_TRIES = 5.0, 60


class NotificationManager:
    """Passes the driver's notifications to every registered state.

    It does so in one thread that starts with the first state.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: weakref.WeakSet[State] = weakref.WeakSet()
        self._thread: threading.Thread | None = None
        self._latest: tuple[float, HostUpdateResult] | None = None

    def listen(self, state: State) -> None:
        """Register a state; it also receives the latest earlier notification.

        Without effect if the job is not elastic.
        """
        self.begin_world(state)
        with self._lock:
            self._listeners.add(state)
            if self._latest is not None:
                state.on_hosts_updated(*self._latest)
            if self._thread is None and self.is_elastic:
                topology = Topology.from_env()
                self._thread = threading.Thread(target=self._receive, args=(topology,), name="hvd-updates", daemon=True)
                self._thread.start()

    def leave_world(self, *, skips_sync: bool) -> None:
        """Prepare the request for a rank in the next world.

        Args:
            skips_sync: the state of this worker is equal to that of every other worker that leaves the world like it.
        """
        if self.is_elastic:
            membership(Topology.from_env()).skips_sync = skips_sync

    def report_state(self) -> None:
        """Report to the driver that this worker has the state of the job."""
        if self.is_elastic:
            membership(Topology.from_env()).report_state()

    def begin_world(self, state: State) -> None:
        """Let ``state`` ignore notifications that are older than the current world."""
        if self.is_elastic:
            member = membership(Topology.from_env())
            member.skips_sync = False
            state.begin_world(member.since)

    def forget(self, state: State) -> None:
        """Unregister ``state``."""
        with self._lock:
            self._listeners.discard(state)

    @property
    def is_elastic(self) -> bool:
        """Whether this process is a worker of an elastic job."""
        return Settings.from_env().elastic and bool(Topology.from_env().worker)

    @property
    def must_sync(self) -> bool:
        """Whether a worker of the current world needs the state from rank 0.

        All ranks get the same answer.
        """
        return self.is_elastic and membership(Topology.from_env()).must_sync

    @property
    def has_changed(self) -> bool:
        """Whether the current world has other workers than the previous one."""
        member = membership(Topology.from_env()) if self.is_elastic else None
        return member is None or member.num_newcomers > 0 or member.num_lost > 0

    def _receive(self, topology: Topology) -> None:
        updates: KeyValueMailbox | None = None
        num_failures = 0
        while True:
            try:
                updates = updates or membership(topology).host_updates()
                message = json.loads(updates.next(_READ_TIMEOUT_S))
            except TimeoutError:
                continue
            except OSError as error:
                num_failures += 1
                if num_failures >= _MAX_TRIES:
                    # The driver has ended; so will this process.
                    logger.debug("no more notifications from the driver: %s", error)
                    if updates is not None:
                        updates.close()
                    return
                logger.debug("no notification from the driver, trying again: %s", error)
                time.sleep(_RETRY_S)
                continue
            num_failures = 0
            with self._lock:
                self._latest = float(message["at"]), HostUpdateResult(int(message["change"]))
                for state in self._listeners:
                    state.on_hosts_updated(*self._latest)


#: The manager of this process.
notifications = NotificationManager()


def agree_on_update(update: tuple[float, float, int]) -> tuple[float, float, int]:
    """Rank 0's ``update`` on every rank.

    Sends one small tensor instead of a pickled object, because every commit calls it.

    Raises:
        HorovodInternalError: the world has ended.
    """
    collective = Collective(kind=Kind.BROADCAST, process_set=global_process_set, name="elastic.host_update", root=0)
    (agreed,) = collective.begin([torch.tensor(update, dtype=torch.float64, device="cpu")]).wait()
    before, latest, change = agreed.tolist()
    return before, latest, int(change)
