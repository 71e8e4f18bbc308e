"""The world of this process: ``init``, ``shutdown``, its ranks and build options."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any

from hvd_cluster.engine import current
from hvd_cluster.engine import process_sets as sets
from hvd_cluster.engine.current import is_initialized, rank
from hvd_cluster.engine.engine import Engine
from hvd_cluster.engine.interrupts import interrupts
from hvd_cluster.engine.log_output import configure_logging
from hvd_cluster.engine.process_sets import ProcessSet
from hvd_cluster.engine.transports.select import nccl_version
from hvd_cluster.engine.world import assemble
from hvd_cluster.errors import HorovodInternalError
from hvd_cluster.monitor.step_clock import StepTime, step_clock
from hvd_cluster.rendezvous.communicator import is_communicator, join_store_over_mpi, some_of
from hvd_cluster.rendezvous.membership import membership
from hvd_cluster.settings import Settings
from hvd_cluster.topology import Topology, export, inherited_env

#: The functions that the API of every framework has.
__all__ = [
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "step_times",
    "stop_timeline",
]

logger = logging.getLogger(__name__)

engine = current.engine

#: How many worlds of an elastic job may break in a row while they are assembled.
_MAX_BROKEN_WORLDS = 10

_lock = threading.RLock()
#: Only :func:`lend` has made the world, not the user.
_is_lent = False
_static_sets: list[ProcessSet] = []
#: The arguments of the last :func:`init` that joined a world or tried to.
_arguments: tuple[Any, list[ProcessSet] | str | None] = (None, None)
#: How many worlds this process has assembled, by job, generation and name; equal on all ranks.
_attempts: dict[tuple[str, int, str], int] = {}


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Join the world that the launcher describes; without one, a world of one rank.

    A second call does nothing until :func:`shutdown`.

    Args:
        comm: a list of ranks of the launcher's world, which form a world of their own and are numbered in the order of
            the list; or a communicator of mpi4py, whose processes do. All of them call this, and no others.
        process_sets: process sets to register, equal and in equal order on all ranks; or "dynamic", which allows
            ``add_process_set`` and ``remove_process_set``, as ``HOROVOD_DYNAMIC_PROCESS_SETS=1`` does.

    Raises:
        ValueError: the arguments or the environment do not describe a world, or differ between the ranks.
        NotImplementedError: ``comm`` is a list of ranks, and a process set was made from a communicator: not all ranks
            know the ranks of its processes.
        ConnectionError: the other ranks could not be reached in time.
    """
    _init(comm, process_sets)


def _init(comm: Any, process_sets: Sequence[ProcessSet] | str | None, start_timeout_s: float = 0.0) -> None:
    """:func:`init`.

    Args:
        comm, process_sets: those of :func:`init`.
        start_timeout_s: how long the other ranks may take to come, if longer than ``HOROVOD_GLOO_TIMEOUT_SECONDS``.
    """
    with _lock:
        global _is_lent, _arguments
        _is_lent = False
        if is_initialized():
            return
        _arguments = comm, process_sets if isinstance(process_sets, str) else list(process_sets or ())
        _register_exit_hooks()
        settings = Settings.from_env()
        configure_logging(settings)
        if isinstance(process_sets, str):
            if process_sets != "dynamic":
                raise ValueError(f'process_sets={process_sets!r} is neither a list of ProcessSet nor "dynamic"')
            settings = replace(settings, dynamic_process_sets=True)
            process_sets = None
        static = list(process_sets or ())
        if comm is not None and not is_communicator(comm) and any(each.mpi_comm is not None for each in static):
            raise NotImplementedError(
                "init(comm=[ranks]) takes process sets of ranks; for process sets of communicators pass one as comm too"
            )
        started_as = Topology.from_env()
        held = interrupts.begin()
        try:
            held.wait()
            if settings.elastic and started_as.worker:
                _join_elastic(started_as, comm, static, settings)
            else:
                _join(started_as, comm, static, settings, start_timeout_s)
        finally:
            held.end()  # raises what a handler has raised as it is, whatever was made of it


def _join_elastic(started_as: Topology, comm: Any, static: list[ProcessSet], settings: Settings) -> None:
    """Join the next world of an elastic job; if it breaks meanwhile, the one after."""
    member = membership(started_as)
    for attempt in range(_MAX_BROKEN_WORLDS):
        topology = member.next_topology(settings.elastic_timeout_s)
        export(topology.to_env())  # scripts and their children read it there
        if member.interface:
            settings = replace(settings, gloo_interface=member.interface)
            export({"NCCL_SOCKET_IFNAME": inherited_env().get("NCCL_SOCKET_IFNAME") or member.interface})
        if member.devices:
            export({"CUDA_VISIBLE_DEVICES": member.devices})
        try:
            _join(topology, comm, static, settings)
            return
        except (OSError, EOFError, HorovodInternalError) as error:
            if attempt == _MAX_BROKEN_WORLDS - 1 or interrupts.has_come:
                raise
            logger.info("generation %d could not be assembled: %s", topology.generation, error)


def _join(
    topology: Topology, comm: Any, static: list[ProcessSet], settings: Settings, start_timeout_s: float = 0.0
) -> None:
    """Become ``topology.rank`` of the world that it describes."""
    server = None
    start_settings = replace(settings, gloo_timeout_s=max(settings.gloo_timeout_s, start_timeout_s))
    if is_communicator(comm):
        joined = join_store_over_mpi(comm, start_settings.gloo_timeout_s, settings.gloo_interface)
        topology, server = joined.topology, joined.server
    elif comm is not None:
        topology = some_of(topology, comm)
    job = (topology.job_id, topology.generation, topology.world)
    attempt = _attempts[job] = _attempts.get(job, -1) + 1

    def forget_attempt() -> None:
        if interrupts.has_come:  # the others have not failed, and wait in this attempt
            _attempts[job] -= 1

    # After any exception, also an interrupt, nothing of the unfinished world may remain.
    with ExitStack() as on_failure:
        on_failure.callback(forget_attempt)
        if server is not None:
            on_failure.callback(server.close)
        table = sets.register(static, topology.size, comm if is_communicator(comm) else None)
        on_failure.callback(sets.unregister, static)
        terms: dict[str, object] = {"init(process_sets=...)": [list(ranks) for id, ranks in table.items() if id]}
        terms |= settings.common()
        world = assemble(topology, start_settings, attempt, terms)
        on_failure.callback(world.close)
        if world.client is not None:
            world.client.timeout_s = settings.gloo_timeout_s
        world.server = world.server or server
        started = Engine(world, settings, table)
        is_working, interrupts.is_working = interrupts.is_working, True
        try:
            step_clock.restart()
            started.start()
            _static_sets[:] = static
            current.install(started)
            on_failure.pop_all()
        finally:
            interrupts.is_working = is_working
    if settings.timeline and settings.timeline != "DYNAMIC":
        started.record_timeline(settings.timeline, settings.timeline_mark_cycles)


def shutdown() -> None:
    """Leave the world; outstanding operations fail on all ranks. May be called twice.

    A signal handler or ``__del__`` that interrupts a wait for a result only begins this, because the interrupted thread
    has to take part in it: the world has ended soon after the handler has returned.
    """
    with _lock:
        running = current.remove()
        if running is None:
            return
        static = list(_static_sets)
        _static_sets.clear()
        if running.is_advanced_here:
            threading.Thread(target=_leave, args=(running, static), name="hvd-shutdown").start()
        else:
            _leave(running, static)


def rejoin() -> None:
    """Leave the world, and join the next with the arguments of the last :func:`init`.

    Raises:
        ValueError: a process set does not fit the next world.
    """
    shutdown()
    init(*_arguments)


def _leave(running: Engine, static: list[ProcessSet]) -> None:
    with _lock:
        try:
            running.shutdown()
        finally:
            sets.unregister(static)


def lend(comm: Any = None, start_timeout_s: float = 0.0) -> None:
    """:func:`init` for a part of this package, which calls :func:`give_back` later.

    Args:
        comm: that of :func:`init`.
        start_timeout_s: how long the other ranks may take to come, if longer than ``HOROVOD_GLOO_TIMEOUT_SECONDS``.
    """
    global _is_lent
    with _lock:
        if not is_initialized():
            _init(comm, None, start_timeout_s)
            _is_lent = True


def give_back(await_others: Callable[[], None] = lambda: None) -> None:
    """:func:`shutdown`, unless the user has called :func:`init` too.

    Args:
        await_others: returns when all ranks have come here, so that no rank ends what others still do. By default
            this rank does not wait for them.
    """
    if not (_is_lent and is_initialized()):
        return
    with suppress(RuntimeError):  # the world has ended already, or they do not come
        await_others()
    with _lock:
        if _is_lent:
            shutdown()


def size() -> int:
    """Number of workers."""
    return current.topology().size


def is_alone() -> bool:
    """Whether this rank reduces alone, also in graphs traced now: worlds may grow.

    Raises:
        NotInitializedError: ``init()`` has not been called.
    """
    return size() == 1 and not Settings.from_env().elastic


def local_rank() -> int:
    """Index of this worker over the workers of its host."""
    return current.topology().local_rank


def local_size() -> int:
    """Number of workers on this host."""
    return current.topology().local_size


def cross_rank() -> int:
    """Index of this host among the hosts that have a worker of this local rank."""
    return current.topology().cross_rank


def cross_size() -> int:
    """Number of hosts that have a worker of this local rank."""
    return current.topology().cross_size


def is_homogeneous() -> bool:
    """True when every host has the same number of workers."""
    return engine().world.is_homogeneous


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Start the timeline of all ranks; rank 0's call counts, and writes the file.

    Args:
        file_path: the file. In later worlds of an elastic job its name gets the number of the world:
            ``run.generation-1.json``.
        mark_cycles: also record when the engine's cycles begin.

    Raises:
        ValueError: before :func:`init`, or when ``HOROVOD_TIMELINE`` is not "DYNAMIC".
    """
    running = engine()
    if Settings.from_env().timeline != "DYNAMIC":
        raise ValueError("Set HOROVOD_TIMELINE=DYNAMIC to enable dynamic timeline usage.")
    running.record_timeline(file_path, mark_cycles)


def step_times(max_steps: int | None = None) -> list[StepTime]:
    """This rank's last training steps, oldest first, in seconds of each activity.

    A step ends when an optimizer of this module has applied its update, or any of torch's while the default group of
    torch.distributed is "hvd". The first step is left out, because it includes the start of the program. At most 2048
    steps are kept.

    Args:
        max_steps: no more than these.
    """
    return step_clock.recent(max_steps)


def stop_timeline() -> None:
    """Stop recording the timeline; :func:`start_timeline` may follow."""
    engine().record_timeline(None)


def mpi_threads_supported() -> bool:
    """False: nothing here runs on MPI."""
    engine()
    return False


def mpi_enabled() -> bool:
    """False: nothing here runs on MPI."""
    engine()
    return False


def mpi_built() -> bool:
    """False: nothing here runs on MPI."""
    return False


def gloo_enabled() -> bool:
    """True: the CPU's collectives run on Gloo."""
    engine()
    return True


def gloo_built() -> bool:
    """True: torch brings Gloo."""
    return True


def nccl_built() -> int:
    """NCCL's version as one integer, e.g. 22703 for 2.27.3; 0 if torch lacks NCCL."""
    return nccl_version()


def ddl_built() -> bool:
    """False: IBM's DDL is not supported."""
    return False


def ccl_built() -> bool:
    """False: Intel's oneCCL is not supported."""
    return False


def cuda_built() -> bool:
    """True when this torch can use CUDA."""
    import torch

    return torch.version.cuda is not None


def rocm_built() -> bool:
    """True when this torch can use ROCm."""
    import torch

    return torch.version.hip is not None


@lru_cache(maxsize=1)
def _register_exit_hooks() -> None:
    atexit.register(shutdown)
    os.register_at_fork(after_in_child=current.abandon)
