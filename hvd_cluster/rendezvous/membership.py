"""A worker's side of an elastic job: requests for a rank in the next world.

A worker sends a request when it is new or has left its world; the driver answers when a new world is complete. The
messages are JSON. To :data:`DRIVER_BOX`: ``{"worker", "version", "has_state", "request", "skip_sync"}``; when a worker
has received the state of the job for the first time, the first three fields alone. To the worker's own box: the fields
of its new :class:`~hvd_cluster.topology.Topology` with ``interface``, ``devices``, ``newcomers``, ``lost``, ``sync``
and ``since``, or ``{"leave": why}``. The driver refuses workers of another version, so the other fields may change.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import uuid
from dataclasses import replace

from hvd_cluster.rendezvous.client import KeyValueClient, KeyValueMailbox
from hvd_cluster.topology import Topology
from hvd_cluster.version import __version__

logger = logging.getLogger(__name__)

#: The box that the driver reads requests from.
DRIVER_BOX = "elastic/driver"
#: The fields of a topology that a new world changes.
TOPOLOGY_FIELDS = (
    *("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size"),
    *("host", "generation", "master", "rendezvous"),
)


def topology_box(worker: str) -> str:
    """The box that ``worker`` reads its topology from."""
    return f"elastic/topology/{worker}"


def host_update_box(worker: str) -> str:
    """The box that ``worker`` reads changes of the hosts from."""
    return f"elastic/host_updates/{worker}"


class Membership:
    """One process's part in an elastic job."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self._client = KeyValueClient(topology.rendezvous, topology.secret)
        self._topologies = KeyValueMailbox(self._client, topology_box(topology.worker))
        #: The network interface through which other hosts reach this one; empty if there are no other hosts.
        self.interface = ""
        #: Value for CUDA_VISIBLE_DEVICES, in local_rank order; empty for no change.
        self.devices = ""
        #: Workers of this world that were not in the previous one.
        self.num_newcomers = 0
        #: Workers of the previous world that are not in this one.
        self.num_lost = 0
        #: This worker has the state of the job: it has synchronized it in some world.
        self.has_state = False
        #: This worker may skip the synchronization of the state in the next world, as far as it knows.
        self.skips_sync = False
        #: The state must be synchronized in this world: not all of its workers may skip that. Equal on all ranks.
        self.must_sync = True
        #: Creation time of this world, in seconds of the driver's clock; older notifications do not concern it.
        self.since = 0.0

    def next_topology(self, timeout_s: float) -> Topology:
        """Leave the previous world, if there was one, and wait for the next.

        Args:
            timeout_s: how long the driver waits for enough workers. After this time without an answer the worker logs a
                warning and waits again, as long as the launcher is alive: workers that train may take long to reach
                their next commit, and if there are too few workers the driver ends the job.

        Raises:
            ConnectionError: the driver has ended.
            SystemExit: the job continues without this worker.
        """
        # The number lets the driver recognise a request that was pushed twice.
        self._push({"request": uuid.uuid4().hex, "skip_sync": self.skips_sync})
        answer = None
        while answer is None:
            try:
                answer = json.loads(self._topologies.next(timeout_s))
            except TimeoutError:
                logger.warning(
                    "the driver has not assigned a rank to this worker for another %g s; it keeps waiting", timeout_s
                )
        if "leave" in answer:
            logger.info("this worker leaves the job: %s", answer["leave"])
            sys.exit(0)
        self.topology = replace(self.topology, **{name: answer[name] for name in TOPOLOGY_FIELDS})
        self.interface, self.devices = str(answer["interface"]), str(answer["devices"])
        self.num_newcomers, self.num_lost = int(answer["newcomers"]), int(answer["lost"])
        self.must_sync = bool(answer["sync"])
        self.since = float(answer["since"])
        return self.topology

    def report_state(self) -> None:
        """Report once to the driver that this worker has the state of the job."""
        if self.has_state:
            return
        self.has_state = True
        try:
            self._push({})
        except OSError as error:  # the network may be down for a while, and the next request repeats it
            logger.debug("the driver does not know yet that this worker has the state: %s", error)

    def host_updates(self) -> KeyValueMailbox:
        """The driver's notifications about changed hosts, over a separate connection."""
        return KeyValueMailbox(self._client.clone(), host_update_box(self.topology.worker))

    def _push(self, message: dict[str, object]) -> None:
        message = {"worker": self.topology.worker, "version": __version__, "has_state": self.has_state, **message}
        self._client.push(DRIVER_BOX, json.dumps(message).encode())

    def close(self) -> None:
        """Close the connection; this does not affect the job."""
        self._client.close()


_membership: Membership | None = None
_owner_pid = 0


def membership(topology: Topology) -> Membership:
    """The one membership of this process."""
    global _membership, _owner_pid
    if _membership is None or _owner_pid != os.getpid():
        _membership, _owner_pid = Membership(topology), os.getpid()
    return _membership
