"""What a host's ranks share: the ballot, and tensors if the world is all here."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass

from hvd_cluster.engine.messages import Run
from hvd_cluster.engine.shared_memory.arena import Arena
from hvd_cluster.engine.shared_memory.ballot import Ballot
from hvd_cluster.engine.shared_memory.deadline import Check
from hvd_cluster.engine.shared_memory.segment import Segment, SharingGroup, share
from hvd_cluster.engine.transports.shm import ShmTransport
from hvd_cluster.engine.transports.shm_layout import segment_bytes
from hvd_cluster.engine.world import World
from hvd_cluster.settings import MIB, Settings

_PAGE_BYTES = mmap.PAGESIZE


@dataclass
class HostMemory:
    """One rank's view of it."""

    segment: Segment
    ballot: Ballot
    #: Memory for tensors that need not be copied, and the transport of the world; None if there are other hosts.
    arena: Arena | None = None
    transport: ShmTransport | None = None

    def close(self) -> None:
        """Release everything."""
        if self.transport is not None:
            self.transport.close()
        if self.arena is not None:
            self.arena.close()
        self.ballot.release()
        self.segment.close()


def share_host_memory(
    world: World,
    settings: Settings,
    wakeup: int,
    *,
    plan: Callable[[tuple[int, ...]], tuple[Run, ...]],
    check: Check,
) -> HostMemory | None:
    """This host's shared memory, or None on all its ranks; collective over them.

    Args:
        world: the connected world.
        settings: the timeout and the use of shared memory are read.
        wakeup: this rank's eventfd.
        plan: see :class:`Ballot`.
        check: called now and then while waiting; raises if the world is broken.
    """
    ranks = world.tree_position.host_ranks
    size = len(ranks)
    if world.client is None or not settings.shared_memory or size == 1:
        return None
    is_whole_world = size == world.topology.size
    ballot_bytes = _whole_pages(Ballot.num_bytes(size))
    spins = has_core_per_rank(size)

    fixed_bytes = ballot_bytes + (_whole_pages(segment_bytes(size)) if is_whole_world else 0)
    region_bytes = _region_bytes(settings, size) if is_whole_world else 0

    def build(segment: Segment) -> HostMemory:
        ballot = Ballot(
            segment.memory,
            0,
            ranks=ranks,
            index=segment.index,
            wakeups=segment.wakeups,
            plan=plan if is_whole_world else None,
            check=check,
            timeout_s=settings.gloo_timeout_s,
            spins=spins,
        )
        if not is_whole_world:
            return HostMemory(segment, ballot)
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
        return HostMemory(segment, ballot, arena, transport)

    group = SharingGroup(
        world.client,
        f"{world.prefix}host/{ranks[0]}/",
        world.topology.secret,
        ranks,
        world.topology.rank,
        settings.gloo_timeout_s,
    )
    return share(group, fixed_bytes, wakeup, build, sparse_bytes=size * region_bytes)


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES


def _region_bytes(settings: Settings, num_ranks: int) -> int:
    """The size of each rank's region for tensors, which takes no memory until used."""
    if settings.shared_memory_region_mb is not None:
        return int(settings.shared_memory_region_mb * MIB) // _PAGE_BYTES * _PAGE_BYTES
    machine_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return machine_bytes // num_ranks // _PAGE_BYTES * _PAGE_BYTES


def has_core_per_rank(num_ranks: int) -> bool:
    """Whether this host has a core for every rank, so that waiting ranks may spin."""
    return len(os.sched_getaffinity(0)) >= num_ranks
