"""The result of bootstrap: the store that all ranks agreed on."""

from __future__ import annotations

from dataclasses import dataclass

from hvd_cluster.rendezvous.server import KeyValueServer
from hvd_cluster.topology import Topology


@dataclass
class Meeting:
    """The store that the ranks agreed on."""

    #: The topology, with the address and the secret of the store.
    topology: Topology
    #: The store's server, if it runs in this rank.
    server: KeyValueServer | None = None
