"""The thread that hears from the driver that the hosts have changed."""

from __future__ import annotations

import json
import logging
import threading
import time
import weakref

from hvd_cluster.elastic.state import HostUpdateResult, State
from hvd_cluster.rendezvous.mailbox import MailboxReader
from hvd_cluster.rendezvous.membership import membership
from hvd_cluster.settings import Settings
from hvd_cluster.topology import Topology

logger = logging.getLogger(__name__)

_READ_TIMEOUT_S = 3600.0
#: A network may be away for some minutes; the training notices only if it needs it.
_TRY_AGAIN_S, _MOST_TRIES = 5.0, 60


class NotificationManager:
    """Passes the driver's news on to every state that listens. One thread, which starts at the first :meth:`listen`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: weakref.WeakSet[State] = weakref.WeakSet()
        self._thread: threading.Thread | None = None
        self._latest: tuple[float, HostUpdateResult] | None = None

    def listen(self, state: State) -> None:
        """Let ``state`` hear, also what came while nobody listened; nothing comes where the job is not elastic."""
        self.begin_world(state)
        with self._lock:
            self._listeners.add(state)
            if self._latest is not None:
                state.on_hosts_updated(*self._latest)
            if self._thread is None and self.is_elastic:
                topology = Topology.from_env()
                self._thread = threading.Thread(target=self._hear, args=(topology,), name="hvd-news", daemon=True)
                self._thread.start()

    def begin_world(self, state: State) -> None:
        """Tell ``state`` which news is too old for the present world."""
        if self.is_elastic:
            state.begin_world(membership(Topology.from_env()).since)

    def forget(self, state: State) -> None:
        """Let ``state`` hear no more."""
        with self._lock:
            self._listeners.discard(state)

    @property
    def is_elastic(self) -> bool:
        """Whether this process is a worker of an elastic job."""
        return Settings.from_env().elastic and bool(Topology.from_env().worker)

    @property
    def num_newcomers(self) -> int:
        """How many workers of the present world were not in the one before."""
        return membership(Topology.from_env()).num_newcomers if self.is_elastic else 0

    @property
    def has_changed(self) -> bool:
        """Whether the present world has other workers than the one before."""
        member = membership(Topology.from_env()) if self.is_elastic else None
        return member is None or member.num_newcomers > 0 or member.num_lost > 0

    def _hear(self, topology: Topology) -> None:
        news: MailboxReader | None = None
        num_vain = 0
        while True:
            try:
                news = news or membership(topology).news()
                told = json.loads(news.next(_READ_TIMEOUT_S))
            except TimeoutError:
                continue
            except OSError as error:
                num_vain += 1
                if num_vain >= _MOST_TRIES:
                    logger.debug("no more news from the driver: %s", error)  # it has ended; so will this process
                    if news is not None:
                        news.close()
                    return
                logger.debug("no news from the driver, trying again: %s", error)
                time.sleep(_TRY_AGAIN_S)
                continue
            num_vain = 0
            with self._lock:
                self._latest = float(told["at"]), HostUpdateResult(int(told["change"]))
                for state in self._listeners:
                    state.on_hosts_updated(*self._latest)


#: The one of this process.
notifications = NotificationManager()
