"""Messages from the controller of an elastic job to its workers: their ranks, and that the hosts have changed."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable
from typing import Any

from hvd_cluster.launch.elastic.elastic_worker import ElasticWorker
from hvd_cluster.rendezvous.client import KeyValueClient
from hvd_cluster.rendezvous.mailbox import post
from hvd_cluster.rendezvous.membership import host_update_box, topology_box

logger = logging.getLogger(__name__)


class Announcer:
    """Posts to the workers' mailboxes in the job's key-value store."""

    def __init__(self, client: KeyValueClient) -> None:
        self._client = client
        self._notified: tuple[bool, bool] = (False, False)
        self._world_since = self._latest = 0.0

    def begin_world(self) -> None:
        """Start a new world: the ranks that follow belong to it, and its members have no notifications yet."""
        self._notified = (False, False)
        self._world_since = self._now()

    def assign_rank(self, member: ElasticWorker, assignment: dict[str, Any]) -> None:
        """Send a worker its rank in the world, and the other fields of its topology."""
        self._post(topology_box(member.name), {**assignment, "since": self._world_since})

    def dismiss(self, member: ElasticWorker) -> None:
        """Ask a worker that has requested a rank to exit."""
        self._post(topology_box(member.name), {"leave": f"{member.host} is no longer needed"})

    def notify_change(self, members: Iterable[ElasticWorker], adds: bool, removes: bool) -> None:
        """Notify the members that workers will be added or removed, unless they were notified of the same before."""
        if (adds, removes) in ((False, False), self._notified):
            return
        self._notified = (adds, removes)
        logger.info("notifying the workers: %s", "new workers are ready" if adds else "some workers must leave")
        news = {"at": self._now(), "change": 2 * adds + removes}  # HostUpdateResult
        for member in members:
            self._post(host_update_box(member.name), news)

    def _now(self) -> float:
        """A strictly increasing time: notifications that are not newer than a world do not concern it."""
        self._latest = max(time.time(), self._latest + 1e-3)
        return self._latest

    def _post(self, box: str, message: dict[str, Any]) -> None:
        post(self._client, box, json.dumps(message).encode())
