"""The one engine of this process, between ``init`` and ``shutdown``."""

from __future__ import annotations

from hvd_cluster.engine.engine import Engine
from hvd_cluster.errors import HorovodInternalError, NotInitializedError
from hvd_cluster.topology import Topology

_engine: Engine | None = None
#: The engine belongs to the process that this one was forked from. Asking for the process id takes a system call.
_is_inherited = False


def is_initialized() -> bool:
    """True from :func:`~hvd_cluster.engine.basics.init` until ``shutdown()``."""
    return _engine is not None and not _is_inherited


def engine() -> Engine:
    """The engine of this process.

    Raises:
        NotInitializedError: before ``init()``; it is a ValueError.
        HorovodInternalError: in a process forked after ``init()``.
    """
    if _engine is None:
        raise NotInitializedError
    if _is_inherited:
        raise HorovodInternalError(
            "this process was forked after hvd.init() and is not a rank: use hvd in the process that called init(), "
            "or start the workers of a DataLoader with multiprocessing_context='spawn'"
        )
    return _engine


def topology() -> Topology:
    """This rank's position in its world; also for data loaders in a forked child.

    Raises:
        NotInitializedError: before ``init()``.
    """
    if _engine is None:
        raise NotInitializedError
    return _engine.world.topology


def rank() -> int:
    """Index of this worker over all workers."""
    return topology().rank


def install(started: Engine) -> None:
    """Make ``started`` the engine of this process."""
    global _engine, _is_inherited
    _is_inherited = False
    _engine = started


def remove() -> Engine | None:
    """Take the engine away and return it; None if this process has none of its own."""
    global _engine
    if not is_initialized():
        return None
    removed, _engine = _engine, None
    return removed


def abandon() -> None:
    """In a forked child: release the engine of the parent without ending it."""
    global _is_inherited
    _is_inherited = True
    if _engine is not None:
        _engine.abandon()
