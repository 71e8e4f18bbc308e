"""Where a :class:`ShmTransport` has its parts in the memory of its ranks."""

from __future__ import annotations

from hvd_cluster.engine.shared_memory.semaphores import STRIDE_BYTES, Barrier

#: Where the slots begin.
_ALIGNMENT_BYTES = 4096
#: Long enough to hide the barrier, short enough that what a rank has just copied is still in a cache. With two ranks,
#: 23 to 100 MB take 0.65 to 0.8 of the time that slots of a quarter of this size take.
_SLOT_BYTES = 1 << 20
#: Chunks in progress at once; see the proofs in :mod:`hvd_cluster.engine.transports.shm`.
NUM_TURNS = 3
#: The segment of a host stays below this, whatever its number of ranks.
_MAX_BYTES = 256 << 20
#: If one operation has more tensors than this, they are copied even if they are in the arena.
MAX_ANNOUNCED = 63
ANNOUNCEMENT_BYTES = 8 * (1 + MAX_ANNOUNCED)


def segment_bytes(num_ranks: int) -> int:
    """The size of the part of a segment that a :class:`ShmTransport` needs."""
    return control_bytes(num_ranks) + NUM_TURNS * (num_ranks + 1) * slot_bytes(num_ranks)


def slot_bytes(num_ranks: int) -> int:
    """The size of a rank's slot."""
    most = _MAX_BYTES // (NUM_TURNS * (num_ranks + 1)) // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES
    return max(_ALIGNMENT_BYTES, min(_SLOT_BYTES, most))


def piece_bytes(num_ranks: int) -> int:
    """How much a rank reduces in place at once: four pieces fit into a core's cache."""
    return max(1 << 18, (1 << 20) // num_ranks // STRIDE_BYTES * STRIDE_BYTES)


def tables_start(num_ranks: int) -> int:
    """Where the semaphores end, and the tables of sizes begin."""
    return Barrier.num_semaphores(num_ranks) * STRIDE_BYTES


def control_bytes(num_ranks: int) -> int:
    """The size of semaphores, tables and announcements, up to where the slots begin."""
    num_bytes = tables_start(num_ranks) + 2 * num_ranks * (num_ranks * 8 + ANNOUNCEMENT_BYTES)
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
