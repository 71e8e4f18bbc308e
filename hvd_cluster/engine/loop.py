"""The engine's work in a world of several ranks: receive, agree, execute."""

from __future__ import annotations

import logging
import math
import select
import time
from contextlib import ExitStack
from functools import cache
from typing import Literal, NoReturn

from hvd_cluster.engine.agreement import Agreement
from hvd_cluster.engine.autotune import Tuner
from hvd_cluster.engine.decisions import DecisionRunner
from hvd_cluster.engine.host_memory import has_core_per_rank, share_host_memory
from hvd_cluster.engine.interrupts import interrupts
from hvd_cluster.engine.launched_work import LaunchedWork
from hvd_cluster.engine.messages import (
    Abort,
    Awaited,
    Close,
    Decision,
    Goodbye,
    LogMessage,
    Message,
    ReportBatch,
    StepReport,
    TimelineEvents,
    TimelineSwitch,
    Tune,
)
from hvd_cluster.engine.negotiation import Negotiator
from hvd_cluster.engine.queues import Queues
from hvd_cluster.engine.shared_memory.deadline import Deadline
from hvd_cluster.engine.shared_memory.spinner import Spinner
from hvd_cluster.engine.signature import ranks_of
from hvd_cluster.engine.stall import StallInspector
from hvd_cluster.engine.step_reports import StepReports
from hvd_cluster.engine.submission_queue import Join, Leave, SubmissionQueue
from hvd_cluster.engine.timeline import JobTimeline, Recorder
from hvd_cluster.engine.transports.select import TransportTable
from hvd_cluster.engine.tree_links import PeerLost, TreeLinks
from hvd_cluster.engine.world import World
from hvd_cluster.errors import SHUT_DOWN_TEXT
from hvd_cluster.settings import Settings

logger = logging.getLogger(__name__)

#: How long to wait for the reason after a transport has failed: often a rank has died, and the report is on its way.
_FAILURE_NEWS_S = 0.5
#: How long the engine waits for its children in the tree when the world ends.
SHUTDOWN_TIMEOUT_S = 10.0
#: How soon to retry when the log of the host is full.
_RETRY_S = 0.001


class Loop:
    """The state of one rank. Only the holder of the progress lock calls its methods.

    Args:
        world: the connected world.
        settings: the knobs.
        process_sets: the ranks of each process set; grows and shrinks with the dynamic ones.
        submissions: the requests and commands of the user's threads.
        poll: what the progress thread waits on.
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
        self._rank = world.topology.rank
        self.recorder = Recorder(self._rank, world.topology.host)
        self._is_root = world.tree_position.parent is None
        self._submissions = submissions
        submissions.register(poll)
        self._links = TreeLinks(world, poll)
        self._timeline = JobTimeline(
            self.recorder,
            None if self._is_root else lambda number, records: self._links.send_up(TimelineEvents(number, records)),
            settings.timeline_max_mb,
        )
        self._fusion_threshold_bytes = settings.fusion_threshold_bytes
        tuner = None
        if settings.autotune and self._is_root:
            tuner = Tuner.from_settings(settings, Settings.given(), submissions.cycle_timer.delay_s * 1000)
        self._negotiator = Negotiator(
            world.tree_position,
            {id: frozenset(ranks) for id, ranks in process_sets.items()},
            settings.cache_capacity,
            lambda: self._fusion_threshold_bytes,
            settings.disable_group_fusion,
        )
        self._launched_work = LaunchedWork(settings)
        self._stall = StallInspector(
            world,
            process_sets,
            settings,
            submissions=submissions,
            launched_work=self._launched_work,
            send_up=self._links.send_up,
            send_down=self._links.send_down,
            abort=self._give_up,
        )
        with ExitStack() as undo:  # if a peer dies meanwhile, nothing of this world remains
            if world.client is not None:
                world.client.watch = self._check
            plan, wakeup = self._negotiator.plan, submissions.wakeup
            self.host = share_host_memory(world, settings, wakeup, plan=plan, check=self._check)
            if self.host is not None:
                undo.callback(self.host.close)
            self.transports = TransportTable(world, settings, process_sets, self._check, self.host, wakeup)
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
        self._leads_other_hosts = position.is_leader and self._ballot is not None and not self._has_all_ranks_here
        #: Children that read the log from this rank instead of the ballot.
        self._log_readers = list(position.children if self._ballot is None else position.remote_children)
        self._agreement = Agreement(
            self._negotiator,
            self._ballot,
            position=position,
            quorum=cache(lambda set_id: len(here.intersection(ranks_of(process_sets, set_id)))),
            pending=submissions.pending,
            send_up=self._links.send_up,
            send_down=lambda entries: self._links.send_down(LogMessage(entries), self._log_readers),
            execute=self._execute,
        )
        idle, drained = self.transports.is_idle, self.transports.remove
        self._queues = Queues(process_sets, submissions.wake, self._check, is_idle=idle, on_drained=drained)
        self._decisions = DecisionRunner(
            self._rank,
            process_sets,
            has_all_ranks_here=self._has_all_ranks_here,
            submissions=submissions,
            negotiator=self._negotiator,
            transports=self.transports,
            queues=self._queues,
            launched_work=self._launched_work,
            recorder=self.recorder,
            tuner=tuner,
            tune=self._agreement.tune,
        )
        self.steps = StepReports(
            world,
            settings,
            negotiator=self._negotiator,
            ballot=self._ballot,
            submissions=submissions,
            recorder=self.recorder,
            send_up=self._links.send_up,
            send_down=self._links.send_down,
        )
        spins = self._has_all_ranks_here and has_core_per_rank(world.topology.size)  # messages of other hosts take long
        self._spinner = Spinner(self._ballot if spins else None)
        #: Broken: decisions are not executed any more, because they would wait for ranks that are gone.
        self._phase: Literal["running", "closing", "broken"] = "running"
        self._closes_by_s = math.inf

    # ---- called by the progress lock --------------------------------------------------------------------------------

    def is_done(self) -> bool:
        """Whether it is broken, or has executed all and given children time to leave."""
        if self._phase == "closing" and not self._queues:
            return not self._links.has_children or time.monotonic() > self._closes_by_s
        return self._phase == "broken"

    def work(self, *, is_waited_for: bool) -> None:
        """Do what can be done without waiting.

        Args:
            is_waited_for: a thread waits for what was submitted, so it is negotiated now.
        """
        if self._links.has_message:
            for rank, message in self._links.take():
                self._take_message(rank, message)
        if self._phase == "broken":
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
        """Spin until another rank writes to the ballot, for a moment; True if one has."""
        return self._spinner.spin()

    def may_sleep(self) -> bool:
        """False if there is work; True guarantees that the poll reports what comes."""
        if self._links.has_message or self._queues.has_finished:
            return False
        return self._ballot is None or self._ballot.may_sleep()

    def deadline_s(self) -> float | None:
        """When there is something to do even if the poll reports nothing, or None."""
        retry_s = time.monotonic() + _RETRY_S if self._agreement.is_blocked else None
        earliest_s = self._submissions.expires_s
        next_s = self._timeline.next_flush_s, self._stall.next_check_s(), self.steps.next_s, self._closes_by_s, retry_s
        for time_s in next_s:
            if time_s is not None and time_s < earliest_s:
                earliest_s = time_s
        return None if earliest_s == math.inf else earliest_s

    def handle_events(self, events: list[tuple[int, int]]) -> None:
        """Handle what the poll has reported."""
        for descriptor, event in events:
            if (rank := self._links.rank_of(descriptor)) is None:
                self._submissions.handle_event(descriptor)
            else:
                if event & ~select.EPOLLOUT:
                    self._receive(rank)
                else:
                    self._links.flush(rank)
        self._stall.inspect()
        if (expired := self._submissions.describe_expired(time.monotonic())) is not None:
            self._abort(f"rank {self._rank} on {self._world.topology.host} has waited {expired}")
        self.steps.tick()

    def fail(self, error: BaseException) -> None:
        """The progress thread has failed: report it to every rank."""
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
        """Say goodbye and release everything."""
        with ExitStack() as ends:  # each of them, even if another one raises; the last one first
            ends.callback(self.steps.close)
            for link in self._world.links.values():
                ends.callback(link.close)
            if self.host is not None:
                ends.callback(self.host.close)
            ends.callback(self.transports.close)
            ends.callback(self._links.send_all, Goodbye())
            ends.callback(self._timeline.close)
            ends.callback(self._timeline.stop)

    def expedite(self) -> None:
        """Negotiate now, for a thread that waits without the progress lock."""
        self._submissions.is_urgent = True
        self._submissions.wake()

    def wake(self) -> None:
        """Wake the thread that sleeps in the poll."""
        self._submissions.wake()

    def hand_over(self) -> None:
        """The progress thread leaves; possibly no other thread takes over for a while.

        If nothing is pending, the other ranks do not wake this rank for a moment: in a stream of operations its thread
        returns by itself. The leader of one host among several is an exception: its host may need it for operations
        that do not involve it. Timers that have expired must not wake the engine's thread later.
        """
        if self._submissions.cycle_timer.is_due and self._submissions.end_cycle():
            self.wake()
        if self._submissions.idle_timer.is_due:
            self._submissions.idle_timer.clear()
        if not self._submissions.has_pending and not self._leads_other_hosts:
            self._submissions.idle_timer.start()
        elif not self.may_sleep():
            self.wake()

    # ---- requests and decisions -----------------------------------------------------------------------------------

    def _take_commands(self) -> None:
        while (command := self._submissions.take_command()) is not None:
            if isinstance(command, Join):
                self._decisions.join(command.handle, command.device)
                # First negotiate what was submitted before: otherwise the join would stand in for it, and its late
                # report would be taken for the next request of that name.
                self._negotiate()
                self._stall.note("join")
                self._agreement.join()
            elif isinstance(command, Leave):
                self._agreement.leave(self._rank)
            elif isinstance(command, TimelineSwitch):
                self._switch_timeline(command)
            else:
                raise RuntimeError(command.reason)

    def _negotiate(self) -> None:
        self.recorder.mark_cycle()
        if requests := self._submissions.take_submitted():
            self._stall.note(requests[-1].name)
            self._agreement.submit(requests)

    def _execute(self, decision: Decision) -> None:
        if isinstance(decision, Tune):
            self._fusion_threshold_bytes = decision.fusion_threshold_bytes
            self._submissions.cycle_timer.delay_s = decision.cycle_time_ms / 1000
        elif isinstance(decision, Close):
            self._close(decision)
        else:
            self._decisions.execute(decision)

    def _switch_timeline(self, switch: TimelineSwitch) -> None:
        self._links.send_down(switch)
        self.steps.report()
        if switch.path is None:
            self._timeline.stop()
        else:
            self._timeline.start(switch.path, switch.mark_cycles)

    def _check(self, wait: Deadline | None = None) -> None:
        """In waits for ranks: raise if the world has ended or an interrupt is overdue."""
        self._links.check()
        interrupts.check()
        self._stall.serve(self._links.take_stalls(), wait)

    def _give_up(self, reason: str) -> NoReturn:
        raise PeerLost(reason, self._rank)

    # ---- messages ---------------------------------------------------------------------------------------------------

    def _receive(self, rank: int) -> None:
        try:
            self._links.receive(rank)
        except PeerLost as gone:
            if self._ballot is not None and self._phase != "broken":
                self._agreement.settle()  # the ballot may contain the end
            # An end without a goodbye is an error while an agreed operation is in progress.
            if self._phase != "closing" or (self._queues and not self._links.has_said_goodbye(rank)):
                self._abort(gone.reason, gone.source)

    def _take_message(self, rank: int, message: Message) -> None:
        if isinstance(message, (ReportBatch, LogMessage)) and self._phase == "broken":
            return
        if isinstance(message, ReportBatch):
            self._agreement.receive(rank, message)
        elif isinstance(message, LogMessage):
            self._agreement.receive_log(message.entries)
        elif isinstance(message, Goodbye):
            self._links.note_goodbye(rank)
        elif isinstance(message, TimelineEvents):
            self._timeline.write(message.number, message.records)
        elif isinstance(message, TimelineSwitch):
            self._switch_timeline(message)
        elif isinstance(message, Abort):
            self._abort(message.reason, rank)
        elif isinstance(message, (StepReport, Awaited)):
            self.steps.receive(message)
        else:
            self._stall.receive(message)

    # ---- the end ----------------------------------------------------------------------------------------------------

    def _close(self, close: Close) -> None:
        """End the world in good order: execute what precedes the end, fail the rest."""
        self._phase = "closing"
        self._closes_by_s = time.monotonic() + SHUTDOWN_TIMEOUT_S
        self.steps.report()
        is_mine = close.rank == self._rank
        who = "this rank" if is_mine else f"rank {close.rank} on {self._world.hosts[close.rank]}"
        hint = "" if is_mine else "; ranks with fewer batches than others call hvd.join() after their last one"
        self._decisions.fail_pending(f"{SHUT_DOWN_TEXT} ({who} has called shutdown or ended{hint})")

    def _abort(self, reason: str, source: int | None = None) -> None:
        """Break the world: report it to linked ranks, fail everything, end the waits."""
        if self._phase == "broken":
            return
        self._links.send_all(Abort(reason), but=source)
        self._phase = "broken"
        text = f"{SHUT_DOWN_TEXT} ({reason})"
        self._decisions.fail_pending(text)
        try:
            # Before the handles fail: their owners may write the tensors that a transport still works on.
            self.transports.abort()
            self._launched_work.clear()
        finally:
            self._decisions.fail(text)
