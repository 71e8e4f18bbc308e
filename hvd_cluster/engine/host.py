"""What the ranks of a world on one host share: the ballot, and the memory that the world's tensors travel through."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from hvd_cluster.engine.negotiation import Run
from hvd_cluster.engine.shared_memory.ballot import Ballot
from hvd_cluster.engine.shared_memory.segment import Group, Segment, share
from hvd_cluster.engine.transports.shm import ShmTransport, segment_bytes
from hvd_cluster.engine.world import World
from hvd_cluster.settings import Settings

_PAGE_BYTES = 4096


@dataclass
class Host:
    """One rank's part of it."""

    segment: Segment
    ballot: Ballot
    transport: ShmTransport

    def close(self) -> None:
        """Let go of everything."""
        self.transport.close()
        self.ballot.release()
        self.segment.close()


def share_host(
    world: World,
    settings: Settings,
    bell: int,
    *,
    plan: Callable[[tuple[int, ...]], tuple[Run, ...]],
    check: Callable[[], None],
) -> Host | None:
    """The shared memory of a world on one host, or None on all ranks; collective.

    Args:
        world: the connected world.
        settings: the timeout and the use of shared memory are read.
        bell: this rank's eventfd.
        plan: see :class:`Ballot`.
        check: called now and then while waiting; raises when the world is broken.
    """
    size = world.topology.size
    if world.client is None or not settings.shared_memory or len(set(world.host_keys)) > 1:
        return None
    ranks = tuple(range(size))
    ballot_bytes = -(-Ballot.num_bytes(size) // _PAGE_BYTES) * _PAGE_BYTES
    spins = spares_cores(size)

    def build(segment: Segment) -> Host:
        ballot = Ballot(
            segment.memory, 0, index=segment.index, bells=segment.bells, plan=plan, check=check, spins=spins
        )
        transport = ShmTransport(
            segment.memory,
            ballot_bytes,
            index=segment.index,
            ranks=ranks,
            check=check,
            timeout_s=settings.gloo_timeout_s,
            spins=spins,
        )
        return Host(segment, ballot, transport)

    group = Group(
        world.client,
        f"{world.prefix}host/",
        world.topology.secret,
        ranks,
        world.topology.rank,
        settings.gloo_timeout_s,
    )
    return share(group, ballot_bytes + segment_bytes(size), bell, build)


def spares_cores(num_ranks: int) -> bool:
    """True when every rank of this host can have a core, so that one may spin while it waits for another."""
    return len(os.sched_getaffinity(0)) >= num_ranks
