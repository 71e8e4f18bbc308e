"""One worker of an elastic job, as its controller sees it.

And the messages to the workers.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from hvd_cluster.launch.elastic.policy import Phase, WorkerView
from hvd_cluster.launch.outcome import Outcome
from hvd_cluster.launch.worker_group import STOP_GRACE_S, Worker
from hvd_cluster.rendezvous.client import KeyValueClient
from hvd_cluster.rendezvous.membership import host_update_box, topology_box

#: Seconds that a worker gets to exit when it must leave.
LEAVE_GRACE_S = 30.0


class ElasticWorker:
    """A worker process, which may have another rank in each world.

    Args:
        key: its number in the job.
        name: its name in the job's key-value store.
        host: where it runs.
        slot: its slot on that host.
        label: the rank that its output shows before it has one.
    """

    def __init__(self, key: int, name: str, host: str, slot: int, label: int) -> None:
        self.key = key
        self.name = name
        self.host = host
        self.slot = slot
        self.label = label
        self.phase = Phase.STARTING
        #: In the present world, or in the last one that it was in.
        self.rank: int | None = None
        #: The id of its last request for a rank.
        self.request = ""
        #: It has reported that it has the state of the job.
        self.has_state = False
        #: It said in that request that its state is equal to that of the others that leave for the same reason.
        self.skips_sync = False
        self.worker: Worker | None = None
        #: It must exit, so its end needs no reaction.
        self.is_leaving = False
        self._is_stopping = False
        self._kill_at_s: float | None = None

    @property
    def outcome(self) -> Outcome | None:
        """How it ended, with its last rank."""
        outcome = self.worker.outcome if self.worker is not None else None
        return None if outcome is None else replace(outcome, rank=self.display_rank)

    @property
    def display_rank(self) -> int:
        """The rank that its output shows."""
        return self.label if self.rank is None else self.rank

    def view(self) -> WorkerView:
        """What the policy needs to know."""
        return WorkerView(self.key, self.host, self.phase, self.rank, self.has_state)

    def stop(self, *, shows_stack: bool = False) -> None:
        """End the worker: SIGTERM now, SIGKILL after the grace period.

        The period is the same for a worker that is leaving.

        Args:
            shows_stack: if it is still in a world, it writes its Python stack to its output before.
        """
        if self.worker is not None and not self._is_stopping:
            if shows_stack and self.phase is Phase.RUNNING:
                logger.warning("stopping rank %d (%s), which has not left its world", self.rank, self.worker.place)
                self.worker.write_stack()
            self.is_leaving = self._is_stopping = True
            kill_at_s = time.monotonic() + STOP_GRACE_S
            self._kill_at_s = min(kill_at_s, self._kill_at_s or kill_at_s)
            self.worker.terminate()

    def expect_exit(self) -> None:
        """It must leave: kill it if it has not exited after the grace period."""
        self.is_leaving = True
        self._kill_at_s = time.monotonic() + LEAVE_GRACE_S

    def kill_after_grace(self) -> None:
        """Kill it if its grace period has expired."""
        if self._kill_at_s is not None and time.monotonic() > self._kill_at_s and self.worker is not None:
            self._kill_at_s = time.monotonic() + STOP_GRACE_S
            self.worker.kill()


logger = logging.getLogger(__name__)


class Announcer:
    """Posts to the workers' mailboxes in the job's key-value store."""

    def __init__(self, client: KeyValueClient) -> None:
        self._client = client
        self._notified: tuple[bool, bool] = (False, False)
        self._world_since = self._latest = 0.0

    def begin_world(self) -> None:
        """Start a new world, to which the ranks that follow belong.

        Its members have no notifications yet.
        """
        self._notified = (False, False)
        self._world_since = self._now()

    def assign_rank(self, member: ElasticWorker, assignment: dict[str, Any]) -> None:
        """Send a worker its rank in the world, and the other fields of its topology."""
        self._post(topology_box(member.name), {**assignment, "since": self._world_since})

    def dismiss(self, member: ElasticWorker) -> None:
        """Ask a worker that has requested a rank to exit."""
        self._post(topology_box(member.name), {"leave": f"{member.host} is no longer needed"})

    def notify_change(self, members: Iterable[ElasticWorker], adds: bool, removes: bool) -> None:
        """Notify the members that workers will be added or removed.

        Unless they were notified of the same before.
        """
        if (adds, removes) in ((False, False), self._notified):
            return
        self._notified = (adds, removes)
        logger.info("notifying the workers: %s", "new workers are ready" if adds else "some workers must leave")
        update = {"at": self._now(), "change": 2 * adds + removes}  # HostUpdateResult
        for member in members:
            self._post(host_update_box(member.name), update)

    def _now(self) -> float:
        """A strictly increasing time.

        Notifications that are not newer than a world do not concern it.
        """
        self._latest = max(time.time(), self._latest + 1e-3)
        return self._latest

    def _post(self, box: str, message: dict[str, Any]) -> None:
        self._client.push(box, json.dumps(message).encode())
