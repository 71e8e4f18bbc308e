"""A worker's side of an elastic job: which place has it now? The driver answers through the job's store.

A worker that is new, or has left its world, asks for a place; the driver answers when a new world comes together.
What is asked and answered, as JSON: ``{"worker", "request"}`` to :data:`DRIVER_BOX`; to the worker's own box either the
fields of its new :class:`~hvd_cluster.topology.Topology` with ``interface``, ``devices``, ``newcomers``, ``lost`` and
``since``, or ``{"leave": why}``.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import uuid
from dataclasses import replace

from hvd_cluster.rendezvous.client import KeyValueClient
from hvd_cluster.rendezvous.mailbox import MailboxReader, post
from hvd_cluster.topology import Topology

logger = logging.getLogger(__name__)

#: Where the driver reads what workers ask.
DRIVER_BOX = "elastic/driver"
#: The fields of a topology that a new world changes.
PLACE_FIELDS = (
    *("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size"),
    *("host", "generation", "master", "rendezvous"),
)


def place_box(worker: str) -> str:
    """Where ``worker`` reads its places."""
    return f"elastic/place/{worker}"


def news_box(worker: str) -> str:
    """Where ``worker`` reads that the hosts have changed."""
    return f"elastic/news/{worker}"


class Membership:
    """One process's part in an elastic job.

    Args:
        topology: what the process was started with.
    """

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self._client = KeyValueClient(topology.rendezvous, topology.secret)
        self._places = MailboxReader(self._client, place_box(topology.worker))
        #: The network interface by which the other hosts reach this one; empty where there are none.
        self.interface = ""
        #: For CUDA_VISIBLE_DEVICES, so that the worker's own GPU has its local rank as index; empty for no change.
        self.devices = ""
        #: Workers of the present world that were not in the one before.
        self.num_newcomers = 0
        #: Workers of the world before that are not in the present one.
        self.num_lost = 0
        #: When the present world was made, in seconds, by the clock of the news: what is older is not about it.
        self.since = 0.0

    def next_place(self, timeout_s: float) -> Topology:
        """Leave the world before, if there was one, and wait for the next.

        Args:
            timeout_s: how long the driver waits for enough workers. A worker that has heard nothing for so long says
                so, and waits on while the launcher lives: those that train may take long to their next commit, and
                where there are too few the driver itself ends the job.

        Raises:
            ConnectionError: the driver has gone.
            SystemExit: the job goes on without this worker.
        """
        # By its number the driver knows a request that was pushed twice from one that is new.
        asked = {"worker": self.topology.worker, "request": uuid.uuid4().hex}
        post(self._client, DRIVER_BOX, json.dumps(asked).encode())
        answer = None
        while answer is None:
            try:
                answer = json.loads(self._places.next(timeout_s))
            except TimeoutError:
                logger.warning("the driver has given this worker no place for another %g s; it waits on", timeout_s)
        if "leave" in answer:
            logger.info("this worker leaves the job: %s", answer["leave"])
            sys.exit(0)
        self.topology = replace(self.topology, **{name: answer[name] for name in PLACE_FIELDS})
        self.interface, self.devices = str(answer["interface"]), str(answer["devices"])
        self.num_newcomers, self.num_lost = int(answer["newcomers"]), int(answer["lost"])
        self.since = float(answer["since"])
        return self.topology

    def news(self) -> MailboxReader:
        """What the driver tells this worker unasked, over a connection of its own."""
        return MailboxReader(self._client.clone(), news_box(self.topology.worker))

    def close(self) -> None:
        """Close the connection; the job does not care."""
        self._client.close()


_membership: Membership | None = None
_owner_pid = 0


def membership(topology: Topology) -> Membership:
    """The one membership of this process."""
    global _membership, _owner_pid
    if _membership is None or _owner_pid != os.getpid():
        _membership, _owner_pid = Membership(topology), os.getpid()
    return _membership
