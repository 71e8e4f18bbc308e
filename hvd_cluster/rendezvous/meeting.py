"""What ranks agree on before they form a world."""

from __future__ import annotations

from dataclasses import dataclass

from hvd_cluster.rendezvous.server import KeyValueServer
from hvd_cluster.topology import Topology


@dataclass
class Meeting:
    """Where the ranks meet."""

    #: The topology, now with the address and the secret of the store.
    topology: Topology
    #: The store's server, where this rank serves it.
    server: KeyValueServer | None = None
