"""Process sets: named groups of ranks that carry out collectives among themselves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from hvd_cluster.engine.request import Handle, Kind, Request, Signature

if TYPE_CHECKING:
    from hvd_cluster.engine.engine import Engine

#: The process sets that were added after init().
_registered: list[ProcessSet] = []


class ProcessSet:
    """A group of ranks. Hand it to ``init(process_sets=[...])``, then to any collective as ``process_set=``.

    Args:
        ranks_or_comm: the global ranks, in any order.

    Raises:
        ValueError: an entry is not an int, or stands twice.
    """

    #: Set when the process set is registered; None before and after.
    process_set_id: int | None = None
    #: The global ranks, sorted; None for the global set before ``init``.
    ranks: list[int] | None = None
    #: Always None: process sets are made of ranks here. Kept for programs that read it.
    mpi_comm: Any = None

    def __init__(self, ranks_or_comm: Iterable[int]) -> None:
        ranks = list(ranks_or_comm)
        if any(isinstance(rank, bool) or not isinstance(rank, int) for rank in ranks):
            raise ValueError(f"ProcessSet takes a list of ranks, each an int, and was given {ranks!r}")
        if len(set(ranks)) < len(ranks):
            raise ValueError(f"ProcessSet was given a rank twice: {ranks!r}")
        self.ranks = sorted(ranks)

    def size(self) -> int | None:
        """The number of ranks, or None when the set is not registered."""
        if self.process_set_id is None or self.ranks is None:
            return None
        _check_registered(self)
        return len(self.ranks)

    def rank(self) -> int | None:
        """This process's index in the set, or None when the set is not registered.

        Raises:
            ValueError: this process is not in the set.
        """
        from hvd_cluster.engine import basics

        if self.process_set_id is None or self.ranks is None:
            return None
        _check_registered(self)
        if basics.rank() not in self.ranks:
            raise ValueError("Process is not part of provided process set.")
        return self.ranks.index(basics.rank())

    def included(self) -> bool:
        """True when this process is in the set; also before the set is registered, but not before ``init``."""
        from hvd_cluster.engine import basics

        return self.ranks is None or basics.rank() in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"


class _GlobalProcessSet(ProcessSet):
    def __init__(self) -> None:
        self.process_set_id = 0


#: All ranks; id 0.
global_process_set: ProcessSet = _GlobalProcessSet()


def register(process_sets: Sequence[ProcessSet], world_size: int) -> dict[int, tuple[int, ...]]:
    """Give ids 1, 2, ... to ``process_sets``; return the ranks of every set by id, the global one included.

    Raises:
        ValueError: an entry repeats another one's ranks, or names a rank that does not exist.
    """
    everybody = tuple(range(world_size))
    table = {0: everybody}
    for process_set in process_sets:
        ranks = tuple(process_set.ranks or ())
        if not ranks or ranks[-1] >= world_size or ranks[0] < 0:
            raise ValueError(f"{process_set} does not fit a world of {world_size} ranks")
        if ranks in table.values():
            raise ValueError(
                f"init(process_sets=...) was given the ranks of {process_set} twice; all ranks are a set already"
            )
        table[len(table)] = ranks
    for id, process_set in enumerate(process_sets, start=1):
        process_set.process_set_id = id
    global_process_set.ranks = list(everybody)
    return table


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a process set after ``init``. Every rank of the world calls this, in the same order; it blocks
    until all do.

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
    table = _engine().process_sets
    if not ranks or ranks[0] < 0 or ranks[-1] >= len(table[0]):
        raise ValueError(f"{new} does not fit a world of {len(table[0])} ranks")
    if ranks in table.values():
        raise ValueError(f"A process set with the ranks {list(ranks)} exists already.")
    new.process_set_id = _agree(Kind.ADD_PROCESS_SET, ranks)
    _registered.append(new)
    return new


def remove_process_set(process_set: ProcessSet) -> bool:
    """Forget a process set. Every rank of the world calls this, in the same order; it blocks until all do.

    Returns:
        False for the global set and for one that is not registered; True otherwise, and the object has lost its id.

    Raises:
        ValueError: process sets are not dynamic.
        HorovodInternalError: the ranks named different sets.
    """
    _check_dynamic("removing process sets")
    if not process_set.process_set_id or process_set.process_set_id not in _engine().process_sets:
        return False
    _agree(Kind.REMOVE_PROCESS_SET, tuple(process_set.ranks or ()))
    process_set.process_set_id = None
    return True


def _engine() -> Engine:
    from hvd_cluster.engine import basics

    return basics.engine()


def _check_dynamic(what: str) -> None:
    if not _engine().has_dynamic_process_sets:
        raise ValueError(f"Set HOROVOD_DYNAMIC_PROCESS_SETS=1 to allow {what} after Horovod initialization.")


def _agree(kind: Kind, ranks: tuple[int, ...]) -> int:
    """Let all ranks of the world carry out ``kind``; the id of the process set."""
    handle = Handle(_engine().drive)
    # The name holds no ranks, so that different ones meet, and are told so.
    request = Request(kind.value, 0, Signature(kind, ranks=ranks), [], [], lambda _: None, handle)
    _engine().submit(request, is_waited_for=True)
    id: int = handle.wait()
    return id


def unregister(process_sets: Iterable[ProcessSet]) -> None:
    """Forget what :func:`register` did."""
    for process_set in (*process_sets, *_registered):
        process_set.process_set_id = None
    _registered.clear()
    global_process_set.ranks = None


def _check_registered(process_set: ProcessSet) -> None:
    from hvd_cluster.engine import basics

    if process_set.process_set_id not in basics.engine().process_sets:
        raise ValueError("Process set does not exist or has not been registered.")
