"""What the ranks of a world on one host share: the ballot, and the memory that the world's tensors travel through."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from hvd_cluster.engine.messages import Run
from hvd_cluster.engine.shared_memory.arena import Arena
from hvd_cluster.engine.shared_memory.ballot import Ballot
from hvd_cluster.engine.shared_memory.segment import Group, Segment, share
from hvd_cluster.engine.transports.shm import ShmTransport, segment_bytes
from hvd_cluster.engine.world import World
from hvd_cluster.settings import MIB, Settings

_PAGE_BYTES = 4096


@dataclass
class Host:
    """One rank's part of it."""

    segment: Segment
    ballot: Ballot
    arena: Arena
    transport: ShmTransport

    def close(self) -> None:
        """Let go of everything."""
        self.transport.close()
        self.arena.close()
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

    fixed_bytes = ballot_bytes + segment_bytes(size)
    region_bytes = _region_bytes(settings, size)

    def build(segment: Segment) -> Host:
        ballot = Ballot(
            segment.memory,
            0,
            index=segment.index,
            bells=segment.bells,
            plan=plan,
            check=check,
            timeout_s=settings.gloo_timeout_s,
            spins=spins,
        )
        arena = Arena(segment.memory, os.dup(segment.descriptor), fixed_bytes, region_bytes, segment.index)
        transport = ShmTransport(
            segment.memory,
            ballot_bytes,
            arena=arena,
            index=segment.index,
            ranks=ranks,
            check=check,
            timeout_s=settings.gloo_timeout_s,
            spins=spins,
        )
        return Host(segment, ballot, arena, transport)

    group = Group(
        world.client,
        f"{world.prefix}host/",
        world.topology.secret,
        ranks,
        world.topology.rank,
        settings.gloo_timeout_s,
    )
    return share(group, fixed_bytes, bell, build, sparse_bytes=size * region_bytes)


def _region_bytes(settings: Settings, num_ranks: int) -> int:
    """How much of the segment each rank may allocate tensors in; takes no memory before that."""
    if settings.shared_memory_region_mb is not None:
        return int(settings.shared_memory_region_mb * MIB) // _PAGE_BYTES * _PAGE_BYTES
    machine_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return machine_bytes // num_ranks // _PAGE_BYTES * _PAGE_BYTES


def spares_cores(num_ranks: int) -> bool:
    """True when every rank of this host can have a core, so that one may spin while it waits for another."""
    return len(os.sched_getaffinity(0)) >= num_ranks
