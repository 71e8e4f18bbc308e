"""What the driver of an elastic job tells its workers: their places, and that the hosts have changed."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable
from typing import Any

from hvd_cluster.launch.elastic.elastic_worker import ElasticWorker
from hvd_cluster.rendezvous.client import KeyValueClient
from hvd_cluster.rendezvous.mailbox import post
from hvd_cluster.rendezvous.membership import news_box, place_box

logger = logging.getLogger(__name__)


class Announcer:
    """Posts to the workers' boxes in the job's store.

    Args:
        client: a connection to the store.
    """

    def __init__(self, client: KeyValueClient) -> None:
        self._client = client
        self._told: tuple[bool, bool] = (False, False)
        self._world_since = self._latest = 0.0

    def begin_world(self) -> None:
        """The places that follow are those of a new world: no news was told of it yet."""
        self._told = (False, False)
        self._world_since = self._now()

    def assign_rank(self, member: ElasticWorker, place: dict[str, Any]) -> None:
        """Tell a worker its place in the world."""
        self._post(place_box(member.name), {**place, "since": self._world_since})

    def dismiss(self, member: ElasticWorker) -> None:
        """Tell a worker that has asked for a place to end."""
        self._post(place_box(member.name), {"leave": f"{member.host} is needed no more"})

    def notify_change(self, members: Iterable[ElasticWorker], adds: bool, removes: bool) -> None:
        """Tell the world that workers are to be added or removed, where it was not told so before."""
        if (adds, removes) in ((False, False), self._told):
            return
        self._told = (adds, removes)
        logger.info("telling the workers that %s", "workers are ready to join" if adds else "workers are to leave")
        news = {"at": self._now(), "change": 2 * adds + removes}  # HostUpdateResult
        for member in members:
            self._post(news_box(member.name), news)

    def _now(self) -> float:
        """A time that always rises: news that is not newer than a world is not about it."""
        self._latest = max(time.time(), self._latest + 1e-3)
        return self._latest

    def _post(self, box: str, message: dict[str, Any]) -> None:
        post(self._client, box, json.dumps(message).encode())
