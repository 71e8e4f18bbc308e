"""One worker of an elastic job, as its controller sees it."""

from __future__ import annotations

import time
from dataclasses import replace

from hvd_cluster.launch.elastic.policy import Phase, WorkerView
from hvd_cluster.launch.outcome import Outcome
from hvd_cluster.launch.worker_group import STOP_GRACE_S, Worker

#: Seconds that a worker gets to exit after it was told to leave.
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
        self.worker: Worker | None = None
        #: It was told to exit, so its end needs no reaction.
        self.is_leaving = False
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
        return WorkerView(self.key, self.host, self.phase, self.rank)

    def stop(self) -> None:
        """End it: SIGTERM now, SIGKILL after the grace period."""
        if self.worker is not None and not self.is_leaving:
            self.is_leaving = True
            self._kill_at_s = time.monotonic() + STOP_GRACE_S
            self.worker.terminate()

    def expect_exit(self) -> None:
        """It was told to leave; kill it if it has not exited after the grace period."""
        self.is_leaving = True
        self._kill_at_s = time.monotonic() + LEAVE_GRACE_S

    def kill_if_overdue(self) -> None:
        """Kill it if its grace period has expired."""
        if self._kill_at_s is not None and time.monotonic() > self._kill_at_s and self.worker is not None:
            self._kill_at_s = time.monotonic() + STOP_GRACE_S
            self.worker.kill()
