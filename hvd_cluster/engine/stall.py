"""The stall inspector: reports which ranks a tensor waits for, and what those ranks have done last.

A rank whose request has waited too long reports it to the root of the tree. The root queries all ranks and, a moment
later, writes one warning from their replies. A rank that does not reply in time is stopped, or holds Python's
interpreter lock.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hvd_cluster.engine.messages import StallMessage, StallQuery, StallReply, StallReport
from hvd_cluster.engine.request import Key, Request
from hvd_cluster.settings import Settings

logger = logging.getLogger(__name__)

#: How long the root waits for replies.
_REPLY_TIMEOUT_S = 1.0
#: How long another rank waits for the query of the root before it assumes that the root is stopped.
_ROOT_TIMEOUT_S = 5.0
#: How many names are listed for each rank.
_MAX_NAMES = 6


@dataclass
class _OpenQuery:
    query: StallQuery
    deadline_s: float
    replies: dict[int, StallReply] = field(default_factory=dict)


class StallInspector:
    """One rank's part. The engine calls :meth:`inspect` at :meth:`next_check_s`, and :meth:`receive` for messages.

    Args:
        rank: this rank.
        hosts: the host of each rank, for the warning.
        process_sets: the ranks of each process set.
        settings: the two times, and whether to inspect at all.
        send_up: sends a message to the parent in the tree; not called at the root.
        send_down: sends a message to the children.
        abort: ends the job with a text.
    """

    def __init__(
        self,
        rank: int,
        hosts: Sequence[str],
        process_sets: Mapping[int, tuple[int, ...]],
        settings: Settings,
        *,
        send_up: Callable[[StallMessage], None],
        send_down: Callable[[StallMessage], None],
        abort: Callable[[str], None],
    ) -> None:
        self._rank = rank
        self._hosts = hosts
        self._process_sets = process_sets
        self._is_off = settings.stall_check_disable
        self._warning_s = settings.stall_warning_s
        self._shutdown_s = settings.stall_shutdown_s
        if self._shutdown_s and self._shutdown_s < self._warning_s:
            logger.warning(
                "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=%g is less than HOROVOD_STALL_CHECK_TIME_SECONDS=%g: ignored",
                self._shutdown_s,
                self._warning_s,
            )
            self._shutdown_s = 0.0
        self._send_up = send_up
        self._send_down = send_down
        self._abort = abort
        #: The submission times of requests that the root knows about.
        self._reported: dict[Key, float] = {}
        #: The submission time of the request for which the root is about to end the job.
        self._given_up_s: float | None = None
        self._root_deadline_s: float | None = None
        self._last: tuple[str, float] = ("", 0.0)
        self._has_joined = False
        self._warned: dict[Key, float] = {}
        self._queries: list[_OpenQuery] = []
        self._num_queries = 0

    def note(self, name: str) -> None:
        """This rank has submitted something."""
        self._last = (name, time.monotonic())
        self._has_joined = False

    def note_join(self) -> None:
        """This rank has joined."""
        self._last = ("join", time.monotonic())
        self._has_joined = True

    @property
    def is_waiting(self) -> bool:
        """A reply is awaited."""
        return bool(self._queries) or self._root_deadline_s is not None

    def next_check_s(self, pending: Iterable[Request]) -> float | None:
        """When :meth:`inspect` has something to do, or None. ``pending`` is in the order of submission."""
        deadlines = [open_query.deadline_s for open_query in self._queries]
        if self._root_deadline_s is not None:
            deadlines.append(self._root_deadline_s)
        if not self._is_off:
            oldest = next(iter(pending), None)
            if oldest is not None and self._shutdown_s and self._given_up_s != oldest.submitted_s:
                deadlines.append(oldest.submitted_s + self._shutdown_s)
            fresh = next((r for r in pending if self._reported.get(r.key) != r.submitted_s), None)
            if fresh is not None:
                deadlines.append(fresh.submitted_s + self._warning_s)
        return min(deadlines, default=None)

    def inspect(self, pending: Sequence[Request]) -> None:
        """Report to the root what has waited too long, and write the warnings whose replies have arrived."""
        now_s = time.monotonic()
        if not self._is_off and pending:
            late = [
                request
                for request in pending
                if now_s - request.submitted_s >= self._warning_s
                and self._reported.get(request.key) != request.submitted_s
            ]
            oldest_s = pending[0].submitted_s
            is_final = bool(self._shutdown_s) and now_s - oldest_s >= self._shutdown_s
            if late or (is_final and self._given_up_s != oldest_s):
                self._reported = {r.key: self._reported[r.key] for r in pending if r.key in self._reported}
                self._reported |= {request.key: request.submitted_s for request in late}
                if is_final:
                    self._given_up_s = oldest_s
                keys = [r.key for r in pending if now_s - r.submitted_s >= self._warning_s]
                if self._rank != 0:
                    self._root_deadline_s = now_s + _ROOT_TIMEOUT_S
                report = StallReport(tuple(keys), is_final)
                if self._rank == 0:
                    self._send_query(report, {request.key: request for request in pending})
                else:
                    self._send_up(report)
        if self._root_deadline_s is not None and now_s >= self._root_deadline_s:
            self._root_deadline_s = None
            self._report_silent_root(pending)
        for open_query in [each for each in self._queries if each.deadline_s <= now_s]:
            self._queries.remove(open_query)
            self._conclude(open_query)

    def receive(self, message: StallMessage, pending: Mapping[Key, Request]) -> None:
        """A message of another rank's inspector. Questions travel down to every rank, all others up to the root."""
        if isinstance(message, StallQuery):
            self._send_down(message)
            self._root_deadline_s = None
            self._send_up(self._reply(message, pending))
            # The root queries once for what several ranks wait for; a later report would get no query.
            self._reported |= {key: pending[key].submitted_s for key in message.keys if key in pending}
            if message.is_final:
                self._given_up_s = next((request.submitted_s for request in pending.values()), None)
        elif self._rank != 0:
            self._send_up(message)
        elif isinstance(message, StallReply):
            for open_query in self._queries:
                if open_query.query.number == message.number:
                    open_query.replies[message.rank] = message
                    if len(open_query.replies) == len(self._hosts):
                        open_query.deadline_s = time.monotonic()
        else:
            self._send_query(message, pending)

    def _send_query(self, report: StallReport, pending: Mapping[Key, Request]) -> None:
        now_s = time.monotonic()
        # Every waiting rank reports the same tensor; one warning is enough until it is decided.
        keys = [key for key in report.keys if now_s - self._warned.get(key, -1e9) >= self._warning_s]
        if report.is_final:
            keys = list(report.keys)
            if any(open_query.query.is_final for open_query in self._queries):
                return
        if not keys:
            return
        recent = {key: at_s for key, at_s in self._warned.items() if now_s - at_s < self._warning_s}
        self._warned = recent | dict.fromkeys(keys, now_s)
        self._num_queries += 1
        query = StallQuery(self._num_queries, tuple(keys), report.is_final)
        open_query = _OpenQuery(query, now_s + _REPLY_TIMEOUT_S)
        self._queries.append(open_query)
        open_query.replies[self._rank] = self._reply(query, pending)
        self._send_down(query)

    def _report_silent_root(self, pending: Sequence[Request]) -> None:
        """Neither a decision nor a query has arrived: the root, or a leader on the way to it, is stopped."""
        waiting = [request.key for request in pending if request.key in self._reported]
        if not waiting:
            return
        text = (
            f"Rank {self._rank} has waited for {_names(waiting)} for more than {self._warning_s:g} seconds, and rank 0 "
            f"on {self._hosts[0]} does not answer: it, or a leader between, is stopped or holds Python's interpreter "
            "lock."
        )
        if pending[0].submitted_s == self._given_up_s:
            self._abort(text)
        else:
            logger.warning("%s", text)

    def _reply(self, query: StallQuery, pending: Mapping[Key, Request]) -> StallReply:
        name, at_s = self._last
        missing = tuple(
            key
            for key in query.keys
            if key not in pending and self._rank in self._process_sets.get(key[0], ()) and not self._has_joined
        )
        return StallReply(query.number, self._rank, missing, name, time.monotonic() - at_s, self._has_joined)

    def _conclude(self, open_query: _OpenQuery) -> None:
        lines = []
        for rank, host in enumerate(self._hosts):
            reply = open_query.replies.get(rank)
            mark = "!" if open_query.query.is_final else ""
            if reply is None:
                mine = [key for key in open_query.query.keys if rank in self._process_sets.get(key[0], ())]
                lines.append(f"{rank}{mark}: {_names(mine)} - rank {rank} on {host} does not answer")
            elif reply.missing:
                doing = (
                    f"last submitted {reply.last_name}, {reply.last_age_s:.1f} s ago"
                    if reply.last_name
                    else "has submitted nothing yet"
                )
                lines.append(f"{rank}{mark}: {_names(reply.missing)} - rank {rank} on {host} {doing}")
        if not lines:
            return  # all ranks have submitted it meanwhile
        text = (
            "One or more tensors were submitted to be reduced, gathered or broadcasted by subset of ranks and are "
            f"waiting for remainder of ranks for more than {self._warning_s:g} seconds. This may indicate that "
            "different ranks are trying to submit different tensors or that only subset of ranks is submitting "
            "tensors, which will cause deadlock. \nMissing ranks:\n" + "\n".join(lines)
        )
        if open_query.query.is_final:
            text += (
                f'\nOne or more rank (marked by "!") is stalled for longer than {self._shutdown_s:g} seconds. '
                "Will shutdown."
            )
            self._abort(text)
        else:
            logger.warning("%s", text)


def _names(keys: Iterable[Key]) -> str:
    names = [name if process_set_id == 0 else f"{name} (process set {process_set_id})" for process_set_id, name in keys]
    return "[" + ", ".join(names[:_MAX_NAMES]) + (", ..." if len(names) > _MAX_NAMES else "") + "]"
