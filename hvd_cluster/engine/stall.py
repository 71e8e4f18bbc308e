"""The stall inspector: which ranks the others wait for, and what those do.

A rank that has waited too long, for other ranks to submit a request or for its device to complete one, reports it to
the root of the tree. The root queries all ranks and, a moment later, writes one warning from their replies. If a rank
does not reply, the leader of its host says what the kernel knows of its process.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NoReturn

from hvd_cluster.engine.launched_work import LaunchedWork
from hvd_cluster.engine.messages import (
    StallLimit,
    StallMessage,
    StallQuery,
    StallReply,
    StallReport,
    Wait,
    WaitState,
)
from hvd_cluster.engine.peer_state import PeerState
from hvd_cluster.engine.shared_memory.deadline import Deadline
from hvd_cluster.engine.stall_report import describe_stall, indented, is_any_device_busy, names, shutdown_text
from hvd_cluster.engine.submission_queue import SubmissionQueue
from hvd_cluster.engine.waits import Waits
from hvd_cluster.engine.world import World
from hvd_cluster.monitor.stacks import user_stack
from hvd_cluster.settings import Settings

logger = logging.getLogger(__name__)

#: How long the root waits for replies.
_REPLY_TIMEOUT_S = 2.0
#: How long the leader of a host waits for those of its host.
_HOST_REPLY_TIMEOUT_S = 1.0
#: How long the root collects reports into one query: ranks that wait for each other begin at about the same time.
_COLLECT_S = 0.3
#: How long another rank waits for the query of the root before it assumes that the root is stopped.
_ROOT_TIMEOUT_S = 5.0
#: How often a rank inspects while it waits in the middle of an operation.
_SERVE_PERIOD_S = 0.1


@dataclass
class _OpenQuery:
    query: StallQuery
    deadline_s: float
    replies: dict[int, StallReply] = field(default_factory=dict)


@dataclass
class _OpenHostQuery:
    """A query that the ranks of a host have to answer."""

    number: int
    silent: set[int]
    deadline_s: float


class StallInspector:
    """One rank's part in the stall inspection.

    The engine calls :meth:`inspect` at :meth:`next_check_s`, and :meth:`receive` for messages.

    Args:
        world: its ranks, hosts and processes are read.
        process_sets: the ranks of each process set.
        settings: the times, and whether to inspect at all.
        submissions: the requests of this rank.
        launched_work: what this rank has launched on devices.
        send_up: sends a message to the parent in the tree; not called at the root.
        send_down: sends a message to the children.
        abort: ends the job with a message; it raises, also out of the operation in whose middle this rank waits.
    """

    def __init__(
        self,
        world: World,
        process_sets: Mapping[int, tuple[int, ...]],
        settings: Settings,
        *,
        submissions: SubmissionQueue,
        launched_work: LaunchedWork,
        send_up: Callable[[StallMessage], None],
        send_down: Callable[[StallMessage], None],
        abort: Callable[[str], NoReturn],
    ) -> None:
        self._world = world
        self._rank = world.topology.rank
        self._process_sets = process_sets
        self._peers = PeerState(world, process_sets, submissions)
        self._is_off = settings.stall_check_disable
        self._warning_s = settings.stall_warning_s
        self._shutdown_s = settings.stall_shutdown_s
        self._timeout_s = settings.gloo_timeout_s
        #: The same for an operation that has begun: before the transport ends it.
        self._begun_warning_s = min(self._warning_s, 0.8 * self._timeout_s)
        if self._shutdown_s and self._shutdown_s < self._warning_s:
            logger.warning(
                "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=%g is less than HOROVOD_STALL_CHECK_TIME_SECONDS=%g: ignored",
                self._shutdown_s,
                self._warning_s,
            )
            self._shutdown_s = 0.0
        self._submissions = submissions
        self._launched_work = launched_work
        self._send_up = send_up
        self._send_down = send_down
        self._abort = abort
        #: Since when this rank has waited for what the root knows about.
        self._reported: dict[Wait, float] = {}
        #: The same for what has exceeded the timeout, and when that was reported last.
        self._timed_out: dict[Wait, float] = {}
        #: Since when this rank has waited for that for which the root is about to end the job.
        self._given_up_s: float | None = None
        self._root_deadline_s: float | None = None
        self._last: tuple[str, float] = ("", 0.0)
        #: What this rank waits for in the middle of an operation, while :meth:`serve` runs.
        self._wait: Deadline | None = None
        self._served_s = 0.0
        self._waits = Waits(self._rank, process_sets, submissions, launched_work)
        self._warned: dict[Wait, float] = {}
        #: At the root: what to ask all ranks about, and when.
        self._collected: list[Wait] = []
        self._collected_s: float | None = None
        self._queries: list[_OpenQuery] = []
        self._host_queries: list[_OpenHostQuery] = []
        self._num_queries = 0

    def note(self, name: str) -> None:
        """This rank has submitted something."""
        self._last = (name, time.monotonic())

    def serve(self, messages: Iterable[StallMessage], wait: Deadline | None) -> None:
        """In the middle of a wait: answer other ranks, and report what lasts too long.

        Args:
            messages: those that have arrived.
            wait: what it waits for in shared memory, or None.
        """
        self._wait = wait
        try:
            for message in messages:
                self.receive(message)
            if time.monotonic() >= self._served_s + _SERVE_PERIOD_S:
                self.inspect()
                self._served_s = time.monotonic()
            if wait is not None and not self._is_off and not self._launched_work:  # that was reported by inspect()
                self._report_wait(wait)
        finally:
            self._wait = None

    def _report_wait(self, wait: Deadline) -> None:
        is_final = bool(self._shutdown_s) and wait.waited_s >= self._shutdown_s
        if not is_final and (wait.is_reported or wait.waited_s < self._begun_warning_s):
            return
        wait.is_reported = True
        text = (
            f"Rank {self._rank} has waited for {wait.waited_s:.0f} seconds {self._describe(wait, '!' * is_final)}\n"
            f"Rank {self._rank} waits at:\n{indented(user_stack(self._submissions.submitter))}"
        )
        if is_final:
            self._abort(text + shutdown_text(self._shutdown_s))
        logger.warning("%s", text)

    def _describe(self, wait: Deadline, mark: str = "") -> str:
        """What a wait in shared memory is for: operation, late ranks, what stops them."""
        operations = [wait.key for wait in self._launched_work.waits()] or self._launched_work.latest
        return f"in the middle of {names(operations)} for {self._peers.named(wait.late(), mark) or 'other ranks'}"

    def next_check_s(self) -> float | None:
        """When :meth:`inspect` has something to do, or None."""
        self._launched_work.drop_finished()  # else a bucket that is complete would take the slow path below
        oldest = None if self._is_off else self._submissions.oldest_pending()
        has_joined = not self._is_off and self._submissions.joined_s is not None
        is_reported = oldest is not None and bool(self._reported) and Wait(oldest.key) in self._reported
        at_s = self._collected_s or self._root_deadline_s
        if not (has_joined or is_reported or self._queries or self._host_queries or self._launched_work or at_s):
            return None if oldest is None else oldest.since_s + self._warning_s  # nearly always
        deadlines = [query.deadline_s for query in self._queries] + [query.deadline_s for query in self._host_queries]
        if at_s is not None:  # the root has only the one, other ranks the other
            deadlines.append(at_s)
        if self._launched_work.next_poll_s is not None:
            deadlines.append(self._launched_work.next_poll_s)
        if has_joined or oldest is not None:
            waits = self._waits.undecided()
            # As in _report_late(): what was launched may have waited longer.
            oldest_s = min([*waits.values(), self._launched_work.oldest_s or math.inf])
            if self._shutdown_s and self._given_up_s != oldest_s:
                deadlines.append(oldest_s + self._shutdown_s)
            fresh = [since_s for wait, since_s in waits.items() if self._reported.get(wait) != since_s]
            if fresh:
                deadlines.append(min(fresh) + self._warning_s)
        return min(deadlines, default=None)

    def inspect(self) -> None:
        """Report long waits to the root, and write warnings whose replies have arrived.

        Raises:
            RuntimeError: the work of a device has failed.
        """
        now_s, check_s = time.monotonic(), self.next_check_s()
        if check_s is None or now_s < check_s:
            return
        if self._launched_work:
            self._launched_work.poll()
            self._report_timeouts(now_s)
        if not self._is_off:
            self._report_late(now_s)
        if self._root_deadline_s is not None and now_s >= self._root_deadline_s:
            self._root_deadline_s = None
            self._report_silent_root()
        if self._collected_s is not None and now_s >= self._collected_s:
            self._collected_s = None
            self._open_query(tuple(self._collected), StallLimit.CHECK)
            self._collected.clear()
        for host_query in [each for each in self._host_queries if each.deadline_s <= now_s]:
            self._host_queries.remove(host_query)
            self._reply_for_silent(host_query)
        for open_query in [each for each in self._queries if each.deadline_s <= now_s]:
            self._queries.remove(open_query)
            self._conclude(open_query)

    def receive(self, message: StallMessage) -> None:
        """Handle a message; queries travel down to every rank, all others to the root."""
        if isinstance(message, StallQuery):
            self._root_deadline_s = None
            self._send_up(self._reply(message))
            self._pass_down(message)
            # The root queries once for what several ranks wait for; a later report would get no query.
            waits = self._waits.all()
            mine = [wait for wait in message.waits if wait in waits]
            if message.limit == StallLimit.TIMEOUT:
                self._timed_out |= dict.fromkeys(mine, time.monotonic())
            else:
                self._reported |= {wait: waits[wait] for wait in mine}
            if message.limit == StallLimit.SHUTDOWN:
                self._given_up_s = min(waits.values(), default=None)
            return
        if isinstance(message, StallReply):
            for host_query in self._host_queries:
                if host_query.number == message.number:
                    host_query.silent.discard(message.rank)
        if self._rank != 0:
            self._send_up(message)
        elif isinstance(message, StallReply):
            self._take_reply(message)
        else:
            self._query(message)

    # ---- what has waited too long -----------------------------------------------------------------------------------

    def _report_late(self, now_s: float) -> None:
        waits = self._waits.all()
        if not waits:
            return
        on_devices = self._launched_work.on_devices()
        late = {
            wait: since_s
            for wait, since_s in waits.items()
            if now_s - since_s >= (self._begun_warning_s if wait.bucket and wait not in on_devices else self._warning_s)
        }
        oldest_s = next(iter(waits.values()))
        is_final = bool(self._shutdown_s) and now_s - oldest_s >= self._shutdown_s and self._given_up_s != oldest_s
        if is_final or any(self._reported.get(wait) != since_s for wait, since_s in late.items()):
            self._reported = {wait: since_s for wait, since_s in self._reported.items() if wait in waits} | late
            if is_final:
                self._given_up_s = oldest_s
            self._report(tuple(late), StallLimit.SHUTDOWN if is_final else StallLimit.CHECK)

    def _report_timeouts(self, now_s: float) -> None:
        reached = {wait: since_s for wait, since_s in self._launched_work.on_devices().items() if since_s is not None}
        self._timed_out = {wait: at_s for wait, at_s in self._timed_out.items() if wait in reached}
        waits = [
            wait for wait, since_s in reached.items() if now_s - self._timed_out.get(wait, since_s) >= self._timeout_s
        ]
        if waits:
            self._timed_out |= dict.fromkeys(waits, now_s)
            self._report(tuple(waits), StallLimit.TIMEOUT)

    def _report(self, waits: tuple[Wait, ...], limit: StallLimit) -> None:
        report = StallReport(waits, limit)
        if self._rank == 0:
            self._query(report)
        else:
            if self._root_deadline_s is None:  # a later report must not extend the wait
                self._root_deadline_s = time.monotonic() + _ROOT_TIMEOUT_S
            self._send_up(report)

    def _report_silent_root(self) -> None:
        """Report a stopped root or leader: neither a decision nor a query has arrived."""
        waits = self._waits.all()
        waiting = [wait.key for wait in waits if wait in self._reported or wait in self._timed_out]
        if not waiting:
            return
        state = self._peers.process(0) or "it, or a leader between, is stopped or inside a C call"
        text = (
            f"Rank {self._rank} has waited for {names(waiting)} for more than {self._warning_s:g} seconds, and rank 0 "
            f"on {self._world.hosts[0]} does not answer: {state}{self._peers.last_operation(0)}. "
            f"Rank {self._rank} waits at:\n{indented(user_stack(self._submissions.submitter))}"
        )
        if next(iter(waits.values())) == self._given_up_s or any(wait in self._timed_out for wait in waits):
            self._abort(text)
        else:
            logger.warning("%s", text)

    # ---- every rank's reply -----------------------------------------------------------------------------------------

    def _pass_down(self, query: StallQuery) -> None:
        self._send_down(query)
        position = self._world.tree_position
        children = {child for child in position.children if child in position.host_ranks}
        if children:
            self._host_queries.append(_OpenHostQuery(query.number, children, time.monotonic() + _HOST_REPLY_TIMEOUT_S))

    def _reply(self, query: StallQuery) -> StallReply:
        found = ((wait, self._waits.state(wait)) for wait in query.waits)
        states = [(wait, state) for wait, state in found if state is not None]
        if self._wait is not None:  # in the middle of one that has not launched anything yet
            begun = (WaitState.NOT_LAUNCHED, self._submissions.num_decisions)
            states = [(w, WaitState.NOT_COMPLETE if (state, w.bucket) == begun else state) for w, state in states]
        name, at_s = self._last
        return StallReply(
            query.number,
            self._rank,
            tuple(states),
            name,
            time.monotonic() - at_s,
            os.getpid(),
            user_stack(self._submissions.submitter),
            waits="" if self._wait is None else self._describe(self._wait),
        )

    def _reply_for_silent(self, host_query: _OpenHostQuery) -> None:
        for rank in sorted(host_query.silent):
            silence = self._peers.process(rank) or "it is inside a C call that holds Python's interpreter lock"
            self.receive(StallReply(host_query.number, rank, silence=silence + self._peers.last_operation(rank)))

    # ---- the root ---------------------------------------------------------------------------------------------------

    def _query(self, report: StallReport) -> None:
        now_s = time.monotonic()
        if report.limit == StallLimit.CHECK:
            # Every waiting rank reports the same tensor; one warning is enough until it is decided.
            self._warned = {wait: at_s for wait, at_s in self._warned.items() if now_s - at_s < self._warning_s}
            if fresh := [wait for wait in report.waits if wait not in self._warned]:
                self._warned |= dict.fromkeys(fresh, now_s)
                self._collected += fresh
                self._collected_s = self._collected_s or now_s + _COLLECT_S
        elif same := [each.query for each in self._queries if each.query.limit == report.limit]:
            self._pass_down(same[0])  # again: the rank that has reported waits for a query
        elif report.waits:
            self._open_query(report.waits, report.limit)

    def _open_query(self, waits: tuple[Wait, ...], limit: StallLimit) -> None:
        self._num_queries += 1
        query = StallQuery(self._num_queries, waits, limit)
        self._queries.append(_OpenQuery(query, time.monotonic() + _REPLY_TIMEOUT_S))
        self._take_reply(self._reply(query))
        self._pass_down(query)

    def _take_reply(self, reply: StallReply) -> None:
        for open_query in self._queries:
            if open_query.query.number == reply.number:
                open_query.replies[reply.rank] = reply
                if len(open_query.replies) == len(self._world.hosts):
                    open_query.deadline_s = time.monotonic()

    def _conclude(self, open_query: _OpenQuery) -> None:
        query, replies = open_query.query, open_query.replies
        for rank in range(len(self._world.hosts)):
            if rank not in replies:
                replies[rank] = StallReply(query.number, rank, silence=self._peers.silence(rank, replies))
        text = describe_stall(query, replies, self._world.hosts, self._process_sets, self._warning_s)
        if not text:
            return
        if query.limit == StallLimit.CHECK:
            logger.warning("%s", text)
        elif query.limit == StallLimit.SHUTDOWN:
            self._abort(text + shutdown_text(self._shutdown_s))
        elif not is_any_device_busy(replies.values()) and not self._has_ended(replies[self._rank]):
            # What the device of a rank computes may take its time.
            self._abort(text)

    def _has_ended(self, mine: StallReply) -> bool:
        """This rank has completed meanwhile what it had not completed when it replied."""
        return bool(mine.states) and all(self._launched_work.state(wait) is None for wait, _ in mine.states)
