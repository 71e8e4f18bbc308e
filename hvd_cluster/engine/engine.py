"""The engine, which executes the collectives of every framework.

:meth:`Engine.submit` is the only way in. In a world of several ranks :class:`~hvd_cluster.engine.loop.Loop` does the
work, in the thread that holds the :class:`~hvd_cluster.engine.progress_lock.ProgressLock`: the engine's own thread or a
thread that waits for a result. The engine's thread sleeps in one poll over the wakeup descriptor and the tree links, so
an idle worker uses no CPU and notices a dead peer. A world of one works in its callers' threads.
"""

from __future__ import annotations

import logging
import math
import select
import threading
import time
from contextlib import ExitStack
from dataclasses import replace

import torch

from hvd_cluster.engine.buffers import BufferPool
from hvd_cluster.engine.execution import Execution
from hvd_cluster.engine.host_memory import has_core_per_rank
from hvd_cluster.engine.loop import SHUTDOWN_TIMEOUT_S, Loop
from hvd_cluster.engine.messages import Abort, TimelineSwitch
from hvd_cluster.engine.peer_state import PeerState
from hvd_cluster.engine.progress_lock import ProgressLock
from hvd_cluster.engine.request import Handle, Request
from hvd_cluster.engine.shared_memory.arena import Arena
from hvd_cluster.engine.signature import SetId, ranks_of
from hvd_cluster.engine.step_reports import LocalMonitor
from hvd_cluster.engine.submission_queue import Leave, SerialNumber, SubmissionQueue
from hvd_cluster.engine.timeline import JobTimeline, Recorder
from hvd_cluster.engine.transports.alone import AloneTransport
from hvd_cluster.engine.tree_links import PeerLost
from hvd_cluster.engine.world import World
from hvd_cluster.monitor.job_monitor import JobMonitor
from hvd_cluster.settings import Settings

logger = logging.getLogger(__name__)

_CYCLE_MS, _LOCAL_CYCLE_MS = 1.0, 5.0
#: How long a thread waits for the other ranks before it continues without the result.
_BRIEFLY_S = 0.01


class Engine:
    """Executes the collectives of one rank.

    Args:
        world: the connected world; the engine owns it from here on.
        settings: the knobs.
        process_sets: the ranks of each process set; the global set has id 0.
    """

    def __init__(self, world: World, settings: Settings, process_sets: dict[int, tuple[int, ...]]) -> None:
        self.world = world
        self.process_sets = process_sets
        self._settings = settings = replace(settings, autotune_log=world.own_path(settings.autotune_log))
        #: The thread that has called ``init()``.
        self.starter = threading.current_thread()
        self._rank = world.topology.rank
        self._alone: _SingleRankEngine | None = None
        self._progress_lock: ProgressLock | None = None
        cycle_time_ms = settings.cycle_time_ms
        is_on_one_host = len(set(world.host_keys)) == 1
        if cycle_time_ms is None:
            cycle_time_ms = _LOCAL_CYCLE_MS if is_on_one_host else _CYCLE_MS
        #: The engine's thread has no core of its own. Between hosts it waits for the network most of the time.
        self.lacks_cores = is_on_one_host and not has_core_per_rank(2 * world.topology.size)
        self._waits_again_s = 0.0
        self._submissions = SubmissionQueue(cycle_time_ms / 1000)
        if world.topology.size == 1:
            self._alone = _SingleRankEngine(world, settings)
            return
        with ExitStack() as on_failure:
            poll = select.epoll()
            on_failure.callback(self._submissions.close)
            on_failure.callback(poll.close)
            try:
                self._loop = Loop(world, settings, process_sets, self._submissions, poll)
            except PeerLost as gone:
                raise ConnectionError(f"the world could not be assembled: {gone.reason}") from gone
            self._progress_lock = ProgressLock(self._loop, poll)
            on_failure.pop_all()

    def start(self) -> None:
        """Begin to work; called once."""
        if self._progress_lock is not None:
            self._progress_lock.thread.start()
        where, transport = self.world.topology.host, self.transport_name(0, torch.device("cpu"))
        logger.info(
            "rank %d of %d on %s: tensors on CPUs use %s", self._rank, self.world.topology.size, where, transport
        )

    @property
    def has_dynamic_process_sets(self) -> bool:
        """Process sets can be added and removed."""
        return self._settings.dynamic_process_sets

    def transport_name(self, process_set_id: SetId, device: torch.device) -> str:
        """The name of the transport of a process set and kind of device, e.g. "SHM"."""
        return (
            AloneTransport.name if self._progress_lock is None else self._loop.transports[process_set_id, device].name
        )

    @property
    def arena(self) -> Arena | None:
        """Tensor memory that all ranks of this host can access; None if they share none."""
        return None if self._progress_lock is None or self._loop.host is None else self._loop.host.arena

    def submit(self, request: Request, *, is_waited_for: bool = False) -> Handle:
        """Submit a request.

        Args:
            request: its tensors must not be touched until the handle is done.
            is_waited_for: the caller waits for the handle next.

        Raises:
            ValueError: a request of this name is pending, or this rank is not in the process set.
            HorovodInternalError: the world has ended.
        """
        if request.process_set_id:
            self._check_membership(request)
        if self._alone is not None:
            if request.is_unnamed:
                request.name += f".{self.next_number(request.process_set_id, request.name)}"
                request.is_unnamed = False
            self._alone.execute(request)
        else:
            self._submissions.submit(request, is_waited_for=is_waited_for)
            if request.is_ordered and not is_waited_for:
                self.expedite()
        return request.handle

    def _check_membership(self, request: Request) -> None:
        members = ranks_of(self.process_sets, request.process_set_id)
        if not members:
            raise ValueError("Process set does not exist or has not been registered.")
        if self._rank not in members:
            raise ValueError(
                f"{request.signature.kind.value.capitalize()}: Rank {self._rank} is not a member of the provided "
                "process set."
            )

    def expedite(self) -> None:
        """Have the engine's thread negotiate submissions now, not after the cycle time."""
        if self._progress_lock is not None:
            self._loop.expedite()

    def progress(self, handle: Handle, give_up_s: float = math.inf) -> None:
        """Let this thread advance the engine until the outcome of ``handle`` is known.

        Args:
            handle: of a request of this engine.
            give_up_s: ``time.monotonic()`` when it waits no longer.

        Raises:
            HorovodInternalError: this thread does so already; a signal handler or a ``__del__`` waits.
        """
        if self._progress_lock is None:
            return
        if torch.is_inference_mode_enabled():
            # Other threads must be able to use the tensors that the engine makes in this thread.
            with torch.inference_mode(False):
                self._progress_lock.progress_until(handle, give_up_s)
        else:
            self._progress_lock.progress_until(handle, give_up_s)

    def progress_briefly(self, handle: Handle) -> None:
        """Let this thread advance the engine if the engine's thread lacks a core.

        This thread does not wait for ``handle`` yet. Where the ranks keep all cores of the host busy, the engine's
        thread takes this one's core, and each exchange with another rank waits until both threads have theirs. The
        other ranks may wait for what this thread does next: so it does not wait long for them to submit the request
        too, and once in vain, not again for a while.
        """
        now_s = time.monotonic()
        if not self.lacks_cores or now_s < self._waits_again_s or self.is_advanced_here:
            return
        self.progress(handle, now_s + _BRIEFLY_S)
        if not handle.settled():
            self._waits_again_s = now_s + 10 * _BRIEFLY_S

    def join(self, device: int = -1) -> Handle:
        """Report that this rank has run out of data.

        The handle gives the rank that joined last, when all have.

        Args:
            device: the GPU for the zeros that stand in for GPU tensors.

        Raises:
            ValueError: this rank has joined already.
        """
        handle = Handle(self.progress)
        if self._alone is not None:
            handle.succeed(self._rank)
        else:
            self._submissions.join(handle, device)
        return handle

    @property
    def num_joins(self) -> int:
        """How many joins have ended; equal on all ranks whenever they submit the same."""
        return self._submissions.num_joins

    def next_number(self, process_set_id: SetId, family: str) -> SerialNumber:
        """The next number of unnamed operations of one family."""
        return self._submissions.next_number(process_set_id, family)

    def note_span(self, track: str, name: str, start_s: float, end_s: float) -> None:
        """Add to the timeline a span, in ``time.monotonic()``, from outside the engine."""
        recorder = self._alone.recorder if self._alone is not None else self._loop.recorder
        recorder.span(track, name, start_s, end_s)

    @property
    def job_monitor(self) -> JobMonitor | None:
        """The steps of all ranks, on rank 0 of a job that is monitored."""
        if self._alone is not None:
            return None if self._alone.monitor is None else self._alone.monitor.job
        return self._loop.steps.job

    def record_timeline(self, path: str | None, mark_cycles: bool = False) -> None:
        """Start the job's timeline at ``path``, or stop it (None), on all ranks.

        Only rank 0's call has an effect. In later worlds of an elastic job the file has the number of the world in its
        name (:meth:`World.own_path`).
        """
        path = path and self.world.own_path(path)
        if self._alone is not None:
            self._alone.record_timeline(path, mark_cycles)
        elif self._rank == 0:
            self._submissions.command(TimelineSwitch(path, mark_cycles))

    def abort(self, reason: str) -> None:
        """End the world: every pending and later operation fails on all ranks."""
        if self._progress_lock is not None:
            self._submissions.command(Abort(reason))

    @property
    def is_advanced_here(self) -> bool:
        """Whether a signal handler or ``__del__`` has interrupted the advancing thread."""
        return self._progress_lock is not None and self._progress_lock.is_held_here

    def shutdown(self) -> None:
        """Leave in good order: finish what all have agreed on, fail the rest everywhere."""
        if self._alone is not None:
            self._alone.close()
        elif self._progress_lock is not None:
            has_ended = self._progress_lock.has_ended
            reason = "its shutdown() was interrupted"
            try:
                self._submissions.command(Leave())
                if has_ended.wait(self._settings.gloo_timeout_s + SHUTDOWN_TIMEOUT_S):
                    self._progress_lock.thread.join(SHUTDOWN_TIMEOUT_S)
                else:
                    peers = PeerState(self.world, self.process_sets, self._submissions)
                    reason = f"shutdown() was called, but no answer came from {peers.needed_to_leave()}"
            finally:
                if not has_ended.is_set():
                    logger.warning("rank %d: the engine's connections are cut: %s", self._rank, reason)
                    self._submissions.command(Abort(reason))
                    has_ended.wait(SHUTDOWN_TIMEOUT_S)
                self._close()
            return
        self._close()

    def _close(self) -> None:
        self._submissions.close()
        self.world.close()

    def abandon(self) -> None:
        """In a forked child: close, but do not end, the connections that the parent uses."""
        for link in self.world.links.values():
            link.close()
        if self._progress_lock is not None:
            self._progress_lock.abandon()
        self._submissions.abandon()


class _SingleRankEngine:
    """A world of one: the thread that submits executes, one request at a time."""

    def __init__(self, world: World, settings: Settings) -> None:
        self._lock = threading.RLock()
        self._rank = world.topology.rank
        self._buffers = BufferPool()
        self.recorder = Recorder(self._rank, world.topology.host)
        self._timeline = JobTimeline(self.recorder, None, settings.timeline_max_mb)
        self.monitor = LocalMonitor(world.topology.host, settings) if settings.monitors else None

    def execute(self, request: Request) -> None:
        """Execute a request in this thread."""
        device = request.inputs[0].device if request.inputs else torch.device("cpu")
        with self._lock:
            transport = AloneTransport(device, self._rank)
            execution = Execution([request], transport, self._buffers, self.recorder, lambda: None)
            execution.advance(lambda *_: None)
            self._timeline.flush(at_once=True)  # no thread would do this later

    def record_timeline(self, path: str | None, mark_cycles: bool) -> None:
        """Start or stop the timeline."""
        with self._lock:
            if path is None:
                self._timeline.stop()
            else:
                self._timeline.start(path, mark_cycles)

    def close(self) -> None:
        """Write the rest of the timeline, and the monitor's summary."""
        if self.monitor is not None:
            self.monitor.close()
        with self._lock:
            self._timeline.stop()
            self._timeline.close()
