"""Process sets: named groups of ranks with collectives among themselves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hvd_cluster.engine import current
from hvd_cluster.engine.request import Handle, Request
from hvd_cluster.engine.signature import Kind, Signature
from hvd_cluster.rendezvous.communicator import is_communicator, ranks_in

__all__ = ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"]

#: The process sets that were added after init().
_registered: list[ProcessSet] = []


class ProcessSet:
    """A group of ranks.

    Pass it to ``init(process_sets=[...])``, then to any collective as ``process_set=``.

    Args:
        ranks_or_comm: the global ranks, in any order; or a communicator of mpi4py, for ``init`` only: after a
            ``Split`` each rank passes its own part, and every part becomes a process set.

    Raises:
        ValueError: an entry is not an int, or occurs twice.
    """

    #: Set when the process set is registered; None before and after.
    process_set_id: int | None = None
    #: The global ranks, sorted; None for the global set before ``init``.
    ranks: list[int] | None = None
    #: The communicator that it was made from, if any.
    mpi_comm: Any = None

    def __init__(self, ranks_or_comm: Any) -> None:
        if is_communicator(ranks_or_comm):
            self.mpi_comm = ranks_or_comm
            self.ranks = ranks_in(ranks_or_comm)
            return
        ranks = list(ranks_or_comm)
        if any(isinstance(rank, bool) or not isinstance(rank, int) for rank in ranks):
            raise ValueError(f"ProcessSet takes a list of ranks, each an int, and was given {ranks!r}")
        if len(set(ranks)) < len(ranks):
            raise ValueError(f"ProcessSet was given a rank twice: {ranks!r}")
        self.ranks = sorted(ranks)

    def size(self) -> int | None:
        """The number of ranks, or None if the set is not registered."""
        if self.process_set_id is None or self.ranks is None:
            return None
        _check_registered(self)
        return len(self.ranks)

    def rank(self) -> int | None:
        """This process's index in the set, or None if the set is not registered.

        Raises:
            ValueError: this process is not in the set.
        """
        if self.process_set_id is None or self.ranks is None:
            return None
        _check_registered(self)
        if current.rank() not in self.ranks:
            raise ValueError("Process is not part of provided process set.")
        return self.ranks.index(current.rank())

    def included(self) -> bool:
        """Whether this process is in the set, even unregistered, but not before ``init``."""
        return self.ranks is None or current.rank() in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"


class _GlobalProcessSet(ProcessSet):
    def __init__(self) -> None:
        self.process_set_id = 0

    def __reduce__(self) -> str:
        return "global_process_set"  # there is one: copies and pickles refer to it


#: All ranks; id 0.
global_process_set: ProcessSet = _GlobalProcessSet()


def register(process_sets: Sequence[ProcessSet], world_size: int, comm: Any = None) -> dict[int, tuple[int, ...]]:
    """Assign ids 1, 2, ... to ``process_sets``.

    Returns the ranks of every set by id, including the global set.

    Args:
        process_sets: those of this rank.
        world_size: the number of ranks.
        comm: the communicator that the world was made from, if any.

    Raises:
        ValueError: an entry repeats the ranks of another one, or contains a rank that does not exist.
    """
    all_ranks = tuple(range(world_size))
    table = {0: all_ranks}
    for process_set in process_sets:
        for ranks in _parts(process_set, comm):
            if not ranks or ranks[-1] >= world_size or ranks[0] < 0:
                raise ValueError(f"{process_set} does not fit a world of {world_size} ranks")
            if ranks in table.values():
                raise ValueError(
                    f"init(process_sets=...) was given the ranks of {process_set} twice; all ranks are a set already"
                )
            table[len(table)] = ranks
    ids = {ranks: id for id, ranks in table.items()}
    for process_set in process_sets:
        process_set.process_set_id = ids[tuple(process_set.ranks or ())]
    global_process_set.ranks = list(all_ranks)
    return table


def _parts(process_set: ProcessSet, comm: Any) -> list[tuple[int, ...]]:
    """The sets of one entry: its ranks, or the communicators that the ranks pass."""
    if process_set.mpi_comm is None:
        return [tuple(process_set.ranks or ())]
    from mpi4py import MPI

    world = comm if comm is not None else MPI.COMM_WORLD
    process_set.ranks = ranks_in(process_set.mpi_comm, world)
    return sorted(set(world.allgather(tuple(process_set.ranks))))


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a process set after ``init``.

    Every rank of the world calls this, in the same order; it blocks until all do.

    Args:
        process_set: a process set, or its ranks.

    Returns:
        The process set, now with an id.

    Raises:
        ValueError: process sets are not dynamic, or one with these ranks exists.
        HorovodInternalError: the ranks named different sets.
    """
    new = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    _check_dynamic("adding process sets")
    ranks = tuple(new.ranks or ())
    table = current.engine().process_sets
    if not ranks or ranks[0] < 0 or ranks[-1] >= len(table[0]):
        raise ValueError(f"{new} does not fit a world of {len(table[0])} ranks")
    if ranks in table.values():
        raise ValueError(f"A process set with the ranks {list(ranks)} exists already.")
    new.process_set_id = _agree(Kind.ADD_PROCESS_SET, ranks)
    _registered.append(new)
    return new


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set.

    Every rank of the world calls this, in the same order; it blocks until all do.

    Args:
        process_set: one that was registered; not the global one.

    Returns:
        False for the global set and for one that is not registered; True otherwise, and the object has lost its id.

    Raises:
        ValueError: process sets are not dynamic.
        HorovodInternalError: the ranks named different sets.
    """
    _check_dynamic("removing process sets")
    if not process_set.process_set_id or process_set.process_set_id not in current.engine().process_sets:
        return False
    _agree(Kind.REMOVE_PROCESS_SET, tuple(process_set.ranks or ()))
    process_set.process_set_id = None
    _registered[:] = [registered for registered in _registered if registered is not process_set]
    return True


def _check_dynamic(what: str) -> None:
    if not current.engine().has_dynamic_process_sets:
        raise ValueError(f"Set HOROVOD_DYNAMIC_PROCESS_SETS=1 to allow {what} after Horovod initialization.")


def _agree(kind: Kind, ranks: tuple[int, ...]) -> int:
    """Have all ranks of the world execute ``kind``; returns the process set's id."""
    handle = Handle(current.engine().progress)
    # The name has no ranks, so that different ones match and raise an error.
    request = Request(kind.value, 0, Signature(kind, ranks=ranks), [], [], lambda _: None, handle)
    current.engine().submit(request, is_waited_for=True)
    id: int = handle.wait()
    return id


def unregister(process_sets: Iterable[ProcessSet]) -> None:
    """Undo :func:`register`."""
    for process_set in (*process_sets, *_registered):
        process_set.process_set_id = None
    _registered.clear()
    global_process_set.ranks = None


def _check_registered(process_set: ProcessSet) -> None:
    if process_set.process_set_id not in current.engine().process_sets:
        raise ValueError("Process set does not exist or has not been registered.")
