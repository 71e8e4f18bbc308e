"""What whoever drives the engine does: take in requests and messages, agree with the other ranks, carry out."""

from __future__ import annotations

import logging
import select
import time
from contextlib import ExitStack
from functools import cache, partial

import torch

from hvd_cluster.engine.agreement import Agreement
from hvd_cluster.engine.autotune import Observation, Tuner
from hvd_cluster.engine.buffers import BufferPool
from hvd_cluster.engine.execution import Execution, execute_inline
from hvd_cluster.engine.host_memory import has_core_per_rank, share_host_memory
from hvd_cluster.engine.interrupts import interrupts
from hvd_cluster.engine.messages import Bucket, Close, Decision, Entry, JoinDone, Refuse, Tune
from hvd_cluster.engine.negotiation import Negotiator
from hvd_cluster.engine.queues import Queues
from hvd_cluster.engine.request import Handle, Key, Kind, Request, Signature, neutral_for
from hvd_cluster.engine.stall import StallInspector
from hvd_cluster.engine.submission_queue import SubmissionQueue
from hvd_cluster.engine.timeline import JobTimeline, Recorder
from hvd_cluster.engine.transports.select import TransportTable
from hvd_cluster.engine.tree_links import Message, PeerLost, TreeLinks
from hvd_cluster.engine.world import World
from hvd_cluster.errors import (
    SHUT_DOWN_TEXT,
    HorovodInternalError,
    JoinUnsupportedError,
    RanksDisagreeError,
    WorldEndedError,
)
from hvd_cluster.settings import Settings

logger = logging.getLogger(__name__)

#: A transport that fails often does so because a rank has died, and the news of that is on its way.
_FAILURE_NEWS_S = 0.5
#: How long the engine waits at the end for the ranks below it.
SHUTDOWN_TIMEOUT_S = 10.0
#: How soon to try again when the log of the host is full.
_RETRY_S = 0.001
#: A driver looks so often for the other ranks' news before it sleeps: about 50 us.
_MAX_SPINS = 400

_CPU = torch.device("cpu")


class Loop:
    """The state of one rank of a world of several. Only the holder of the progress lock calls its methods.

    Args:
        world: the connected world.
        settings: the knobs.
        process_sets: the ranks of each process set; grows and shrinks with the dynamic ones.
        submissions: where requests come from.
        poll: what the driver waits on.
    """

    def __init__(
        self,
        world: World,
        settings: Settings,
        process_sets: dict[int, tuple[int, ...]],
        submissions: SubmissionQueue,
        poll: select.epoll,
    ) -> None:
        self._world = world
        self._process_sets = process_sets
        self._settings = settings
        self._rank = world.topology.rank
        self.recorder = Recorder(self._rank, world.topology.host)
        self._is_root = world.tree_position.parent is None
        self._submissions = submissions
        poll.register(submissions.wakeup, select.EPOLLIN)
        poll.register(submissions.cycle_timer.descriptor, select.EPOLLIN)
        poll.register(submissions.idle_timer.descriptor, select.EPOLLIN)
        self._links = TreeLinks(world, poll)
        self._timeline = JobTimeline(
            self.recorder,
            None if self._is_root else lambda events: self._links.send_up(("events", events)),
            settings.timeline_max_mb,
        )
        self._buffers = BufferPool()
        self._fusion_threshold_bytes = settings.fusion_threshold_bytes
        self._tuner: Tuner | None = None
        if settings.autotune and self._is_root:
            self._tuner = Tuner.from_settings(settings, Settings.given(), submissions.cycle_timer.delay_s * 1000)
        self._negotiator = Negotiator(
            world.tree_position,
            {id: frozenset(ranks) for id, ranks in process_sets.items()},
            settings.cache_capacity,
            lambda: self._fusion_threshold_bytes,
            settings.disable_group_fusion,
        )
        with ExitStack() as undo:  # a peer that dies meanwhile leaves nothing of this world behind
            check, plan = self._check, self._negotiator.plan
            if world.client is not None:
                world.client.watch = check
            self.host = share_host_memory(world, settings, submissions.wakeup, plan=plan, check=check)
            if self.host is not None:
                undo.callback(self.host.close)
            self.transports = TransportTable(world, settings, process_sets, check, self.host, submissions.wakeup)
            undo.callback(self.transports.close)
            for process_set_id in sorted(process_sets):
                self.transports.build(process_set_id)
            undo.pop_all()
        self._ballot = None if self.host is None else self.host.ballot
        if self._ballot is not None:
            ballot = self._ballot
            self._links.is_closed = lambda: ballot.is_closed
        position = world.tree_position
        here = set(position.host_ranks)
        self._has_all_ranks_here = len(here) == world.topology.size
        self._leads_other_hosts = (
            world.tree_position.is_leader and self._ballot is not None and not self._has_all_ranks_here
        )
        #: Who does not read the log in the ballot.
        self._log_readers = list(
            world.tree_position.children if self._ballot is None else world.tree_position.remote_children
        )
        self._agreement = Agreement(
            self._negotiator,
            self._ballot,
            position=position,
            quorum=cache(lambda process_set_id: len(here.intersection(process_sets[process_set_id]))),
            pending=submissions.pending,
            send_up=lambda message: self._links.send_up(("up", message)),
            send_down=self._send_log,
            execute=self._execute_decision,
        )
        self._queues = Queues(
            process_sets,
            submissions.wake,
            self._check,
            is_idle=self.transports.is_idle,
            on_drained=self.transports.remove,
        )
        self._next_process_set_id = len(process_sets)
        self._stall = StallInspector(
            self._rank,
            world.hosts,
            process_sets,
            settings,
            send_up=lambda message: self._links.send_up(("stall", message)),
            send_down=lambda message: self._links.send_down(("stall", message)),
            abort=self._abort,
        )
        # What other hosts have to say takes longer than a look is worth.
        self._max_spins = _MAX_SPINS if self._has_all_ranks_here and has_core_per_rank(world.topology.size) else 0
        self._typical_spins = 0
        self._join_handle: Handle | None = None
        self._join_device = -1
        self._deciding: list[Request] = []
        self._closing_since_s: float | None = None

    # ---- called by the progress lock --------------------------------------------------------------------------------

    def is_over(self) -> bool:
        """After a close: everything decided is done, and the ranks below have said farewell (or had time to)."""
        if self._is_broken:
            return True
        if self._closing_since_s is None or self._queues:
            return False
        if self._links.has_children:
            return time.monotonic() - self._closing_since_s > SHUTDOWN_TIMEOUT_S
        return True

    def work(self, *, is_waited_for: bool) -> None:
        """Do what can be done without waiting.

        Args:
            is_waited_for: somebody waits for what was submitted, so it is not held back for company.
        """
        if self._links.has_message:
            for rank, message in self._links.take():
                self._take_message(rank, message)
        if self._is_broken:
            return
        if self._submissions.has_commands:
            self._take_commands()
        if self._submissions.has_submitted and (is_waited_for or self._submissions.is_urgent):
            self._negotiate()
        if self._queues.has_finished:
            self._queues.advance()
        self._agreement.settle()
        if self.recorder.enabled:
            self._timeline.flush()
        if self._links.has_sent:
            self._links.rearm()

    def spin(self) -> bool:
        """Look for the other ranks' news for a moment; how long adapts to how long it had to, as in Semaphores."""
        ballot = self._ballot
        if ballot is None:
            return False
        limit = min(self._max_spins, 2 * self._typical_spins + 40)
        looks = 0
        while looks < limit and not ballot.has_unread:
            looks += 1
        self._typical_spins += (looks - self._typical_spins) // 8
        return ballot.has_unread

    def may_sleep(self) -> bool:
        """False if there is something to do; True promises that the poll will report what comes."""
        if self._links.has_message or self._queues.has_finished:
            return False
        return self._ballot is None or self._ballot.may_sleep()

    def deadline_s(self) -> float | None:
        """When there is something to do whatever happens, or None."""
        farewell_s = None if self._closing_since_s is None else self._closing_since_s + SHUTDOWN_TIMEOUT_S
        stall_s = None
        if self._submissions.has_pending or self._stall.is_waiting:
            stall_s = self._stall.next_check_s(list(self._submissions.pending().values()))
        retry_s = time.monotonic() + _RETRY_S if self._agreement.is_blocked else None
        times = (self._timeline.next_flush_s, stall_s, farewell_s, retry_s)
        return min((time_s for time_s in times if time_s is not None), default=None)

    def handle_events(self, events: list[tuple[int, int]]) -> None:
        """Take in what the poll has reported."""
        for descriptor, event in events:
            if descriptor == self._submissions.wakeup:
                self._submissions.clear_wakeup()
            elif descriptor == self._submissions.cycle_timer.descriptor:
                self._submissions.end_cycle()
            elif descriptor == self._submissions.idle_timer.descriptor:
                self._submissions.idle_timer.clear()
            elif (rank := self._links.rank_of(descriptor)) is not None:
                if event & ~select.EPOLLOUT:
                    self._receive(rank)
                else:
                    self._links.flush(rank)
        self._stall.inspect(list(self._submissions.pending().values()))

    def fail(self, error: BaseException) -> None:
        """Driving has failed: every rank must hear of it."""
        where = f"rank {self._rank} on {self._world.topology.host}"
        if isinstance(error, PeerLost):
            self._abort(error.reason, error.source)
            return
        logger.debug("rank %d: the engine failed", self._rank, exc_info=error)
        culprit = self._links.await_failure(_FAILURE_NEWS_S) if isinstance(error, RuntimeError) else None
        if culprit is not None:
            self._abort(culprit.reason, culprit.source)
        elif isinstance(error, Exception):
            self._abort(f"{where} failed: {type(error).__name__}: {error}")
        else:
            self._abort(f"{where} was interrupted in the middle of an operation by {type(error).__name__}")

    def finish(self) -> None:
        """Say farewell and let go of everything."""
        with ExitStack() as ends:  # each of them, whatever becomes of the others
            for link in self._world.links.values():
                ends.callback(link.close)
            if self.host is not None:
                ends.callback(self.host.close)
            ends.callback(self.transports.close)
            ends.callback(self._links.send_all, ("bye", None))
            ends.callback(self._timeline.close)
            ends.callback(self._timeline.stop)

    def expedite(self) -> None:
        """A thread that does not drive waits for what it has submitted."""
        self._submissions.is_urgent = True
        self._submissions.wake()

    def wake(self) -> None:
        """Make the poll report something."""
        self._submissions.wake()

    def hand_over(self) -> None:
        """A driver leaves, and perhaps nobody drives for long.

        Where nothing is pending, the other ranks do not ring for this one for a moment: in a stream of operations it
        comes back by itself. (But for the leader of a host among others, which the ranks of its host may need for what
        does not concern it.) What has gone off while the driver worked shall not wake the engine's thread after it.
        """
        if self._submissions.cycle_timer.is_due and self._submissions.end_cycle():
            self.wake()
        if self._submissions.idle_timer.is_due:
            self._submissions.idle_timer.clear()
        if not self._submissions.has_pending and not self._leads_other_hosts:
            self._submissions.idle_timer.start()
        elif not self.may_sleep():
            self.wake()

    # ---- requests -------------------------------------------------------------------------------------------------

    def _take_commands(self) -> None:
        for name, argument in self._submissions.take_commands():
            if name == "join":
                # What was submitted before counts as submitted: a joined rank's word would stand in for it otherwise,
                # and the late report be taken for the next request of that name.
                self._negotiate()
                self._join_handle, self._join_device = argument
                self._stall.note_join()
                self._agreement.join()
            elif name == "leave":
                self._agreement.leave(self._rank)
            elif name == "timeline":
                self._links.send_down(("timeline", argument))
                self._set_timeline(*argument)
            else:
                raise RuntimeError(argument)

    def _negotiate(self) -> None:
        self.recorder.mark_cycle()
        requests = self._submissions.take_submitted()
        if requests:
            self._stall.note(requests[-1].name)
            self._agreement.submit(requests)

    def _send_log(self, entries: tuple[Entry, ...]) -> None:
        kind = "close" if any(isinstance(entry, Close) for entry in entries) else "log"
        self._links.send_down((kind, entries), self._log_readers)

    # ---- decisions --------------------------------------------------------------------------------------------------

    def _execute_decision(self, decision: Decision) -> None:
        if isinstance(decision, Bucket):
            self._execute_bucket(decision)
        elif isinstance(decision, Refuse):
            request = self._submissions.decide(decision.key)
            if request is not None:
                kind = RanksDisagreeError if decision.is_disagreement else JoinUnsupportedError
                request.handle.fail(kind(decision.text))
        elif isinstance(decision, JoinDone):
            self._submissions.end_join()
            if self._join_handle is not None:
                handle, self._join_handle = self._join_handle, None
                handle.succeed(decision.last_rank)
        elif isinstance(decision, Tune):
            self._fusion_threshold_bytes = decision.fusion_threshold_bytes
            self._submissions.cycle_timer.delay_s = decision.cycle_time_ms / 1000
        elif isinstance(decision, Close):
            self._close(decision)

    def _execute_bucket(self, bucket: Bucket) -> None:
        process_set_id, first = bucket.requests[0][0][0], bucket.requests[0][1]
        if first.kind in (Kind.ADD_PROCESS_SET, Kind.REMOVE_PROCESS_SET):
            self._change_process_sets(bucket.requests[0][0], first)
            return
        # A set that is gone: at a leader, its removal may have come into the log before what was reported earlier.
        if self._rank not in self._process_sets.get(process_set_id, ()):
            return
        keys = [key for key, _ in bucket.requests]
        mine = self._submissions.begin(keys)
        # If anything below raises, these are neither pending nor in a queue, and _abort() has to find them.
        self._deciding = [request for request in mine if request is not None]
        if len(self._deciding) < len(mine) and self._join_handle is None:
            # Zeros in its place would be a wrong result that nobody notices.
            names = ", ".join(key[1] for key, request in zip(keys, mine, strict=True) if request is None)
            raise RuntimeError(f"all ranks were taken to have submitted {names}, and this one has not")
        requests = [
            request if request is not None else neutral_for(key, signature, self._join_device)
            for request, (key, signature) in zip(mine, bucket.requests, strict=True)
        ]
        if self.recorder.enabled:
            now_s = time.monotonic()
            for request in requests:
                for name in request.tensor_names:
                    phase = f"NEGOTIATE_{request.signature.kind.name}"
                    self.recorder.span(name, phase, request.submitted_s, now_s)
        inputs = requests[0].inputs
        device = inputs[0].device if inputs else _CPU
        if (process_set_id, device) not in self.transports:
            self._queues.finish_exclusive()
        transport = self.transports[process_set_id, device]
        meets = transport.ends_in_caller or transport.for_sizes.ends_in_caller
        if transport.is_exclusive or (meets and not self._has_all_ranks_here):
            # It waits for ranks of this host, which may wait for this one in a bucket of other hosts too.
            self._queues.finish_exclusive(but=process_set_id)
        buckets = self._queues[process_set_id]
        observe = None if self._tuner is None else self._observe
        decided_s = 0.0 if observe is None else time.monotonic()
        release = partial(self._submissions.finish, keys)
        if buckets or not execute_inline(requests, transport, self.recorder, release):
            buckets.append(Execution(requests, transport, self._buffers, self.recorder, release, observe))
        elif observe is not None:
            observe(requests, decided_s, time.monotonic())
        self._deciding = []

    def _observe(self, requests: list[Request], decided_s: float, done_s: float) -> None:
        """At the root, while autotune searches: a bucket was carried out."""
        if self._tuner is None or requests[0].signature.kind != Kind.ALLREDUCE:
            return
        parameters = self._tuner.observe(Observation.of(requests, decided_s, done_s))
        if parameters is not None:
            self._agreement.tune(Tune(parameters.fusion_threshold_bytes, parameters.cycle_time_ms))
        if self._tuner.is_done:
            self._tuner = None

    def _change_process_sets(self, key: Key, signature: Signature) -> None:
        """Add or remove a process set; every rank does so at the same place of the log."""
        request = self._submissions.decide(key)
        self._deciding = [] if request is None else [request]
        if signature.kind == Kind.ADD_PROCESS_SET:
            id = self._next_process_set_id
            self._next_process_set_id += 1
            self._negotiator.add_process_set(id, frozenset(signature.ranks))
            self._process_sets[id] = signature.ranks
            self._queues.add(id)
            self._queues.finish_exclusive()
            self.transports.build(id)
        else:
            id = next(id for id, ranks in self._process_sets.items() if ranks == signature.ranks)
            self._negotiator.remove_process_set(id)
            del self._process_sets[id]
            for orphan in self._submissions.withdraw(id):
                orphan.handle.fail(HorovodInternalError(f"the process set of {orphan.name!r} was removed"))
            self._queues.remove(id)
        self._deciding = []
        if request is not None:
            request.handle.succeed(id)

    def _set_timeline(self, path: str | None, mark_cycles: bool) -> None:
        if path is None:
            self._timeline.stop()
        else:
            self._timeline.start(path, mark_cycles)

    def _check(self) -> None:
        """While work waits for other ranks: raise what ends the wait, the end of the world or an overdue interrupt."""
        self._links.check()
        interrupts.check()

    # ---- messages ---------------------------------------------------------------------------------------------------

    def _receive(self, rank: int) -> None:
        try:
            self._links.receive(rank)
        except PeerLost as gone:
            if self._ballot is not None and not self._is_broken:
                self._agreement.settle()  # the end may stand there
            # An end without a farewell, while something all had agreed on is under way, is no end in good order.
            is_expected = self._closing_since_s is not None and (self._links.has_said_bye(rank) or not self._queues)
            if not is_expected:
                self._abort(gone.reason, gone.source)

    def _take_message(self, rank: int, message: Message) -> None:
        kind, content = message
        if kind == "up":
            if not self._is_broken:
                self._agreement.receive(rank, content)
        elif kind in ("log", "close"):
            if not self._is_broken:
                self._agreement.receive_log(content)
        elif kind == "bye":
            self._links.note_bye(rank)
        elif kind == "events":
            self._timeline.write(content)
        elif kind == "stall":
            self._stall.receive(content, self._submissions.pending())
        elif kind == "timeline":
            self._links.send_down(message)
            self._set_timeline(*content)
        else:
            self._abort(content, rank)

    # ---- the end ----------------------------------------------------------------------------------------------------

    @property
    def _is_broken(self) -> bool:
        """After an abort. What was decided before is carried out no more.

        It would wait for ranks that are gone, unnoticed: those that told of the abort have said farewell.
        """
        return self._submissions.has_ended and self._closing_since_s is None

    def _close(self, close: Close) -> None:
        """The world ends in good order: what stands before in the log is finished, the rest fails."""
        self._closing_since_s = time.monotonic()
        who = "this rank" if close.rank == self._rank else f"rank {close.rank} on {self._world.hosts[close.rank]}"
        self._fail_pending(f"{SHUT_DOWN_TEXT} ({who} has called shutdown or ended)")

    def _abort(self, reason: str, source: int | None = None) -> None:
        """The world is broken: tell the neighbours, fail everything, wake what waits in the transports."""
        if self._is_broken:
            return
        self._closing_since_s = None
        self._links.send_all(("abort", reason), but=source)
        text = f"{SHUT_DOWN_TEXT} ({reason})"
        self._fail_pending(text)
        try:
            # Before the waiters wake: they may write the tensors that a transport still works on.
            self.transports.abort()
        finally:
            self._queues.fail(lambda: WorldEndedError(text))
            for request in self._deciding:
                request.handle.fail(WorldEndedError(text))

    def _fail_pending(self, text: str) -> None:
        self._submissions.end(text)
        if self._join_handle is not None:
            handle, self._join_handle = self._join_handle, None
            handle.fail(WorldEndedError(text))
