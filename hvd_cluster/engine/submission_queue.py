"""Submissions of user threads, and the descriptor that wakes the engine's thread."""

from __future__ import annotations

import math
import os
import select
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from hvd_cluster.engine.messages import Abort, TimelineSwitch
from hvd_cluster.engine.request import Handle, Request
from hvd_cluster.engine.signature import Key, SetId
from hvd_cluster.engine.timer import Timer
from hvd_cluster.errors import DUPLICATE_NAME_TEXT, DuplicateNameError, WorldEndedError


@dataclass(frozen=True)
class Join:
    """This rank has run out of data."""

    handle: Handle
    #: The GPU on which zeros for GPU tensors are made.
    device: int


@dataclass(frozen=True)
class Leave:
    """This rank shuts down in good order."""


#: What user threads ask for in addition to collectives.
Command = Join | Leave | TimelineSwitch | Abort

#: Stands for a join where requests are named.
JOIN: Key = (0, "join")

#: Names whose last decision is remembered, at least.
_MAX_DECIDED = 4096
#: In a stream of blocking operations, each begins sooner than this after the previous one.
_REST_S = 0.01


class SerialNumber(NamedTuple):
    """The number of an unnamed operation in its family; equal on all ranks in it.

    A rank that joins early submits fewer operations than the others, so the count restarts when all have joined.
    """

    num_joins: int
    number: int

    def __str__(self) -> str:
        return f"join{self.num_joins}.{self.number}" if self.num_joins else str(self.number)


class SubmissionQueue:
    """Requests and commands for the engine, and the requests not decided yet.

    Args:
        cycle_time_s: how long requests that no thread waits for are held back, to be fused with others.
    """

    def __init__(self, cycle_time_s: float) -> None:
        # A signal handler may submit while its own thread is in here.
        self._lock = threading.RLock()
        #: Since when this rank has joined, until all have.
        self.joined_s: float | None = None
        #: How many joins of all ranks have ended.
        self.num_joins = 0
        #: The number of unnamed operations since the last join, by process set and family.
        self._numbers: dict[tuple[SetId, str], int] = {}
        self._pending: dict[Key, Request] = {}
        #: Ordered requests that wait for an earlier one of the same name.
        self._held: dict[Key, deque[Request]] = {}
        #: No pending request expires before this.
        self.expires_s = math.inf
        #: Requests that are being executed: their tensors are in use.
        self._in_use: set[Key] = set()
        self._submitted: list[Request] = []
        self._commands: deque[Command] = deque()
        self._end: str | None = None
        #: The thread that has submitted last.
        self.submitter: int | None = None
        #: For each process set, the operation that was finished last, and when.
        self.last_finished: dict[SetId, tuple[str, float]] = {}
        #: The decisions of the log that this rank has executed.
        self.num_decisions = 0
        #: By name, the position of the last decision.
        self._decided: dict[Key, int] = {}
        self._decided_before: dict[Key, int] = {}
        #: Submitted requests have waited for the cycle time, or a thread without the progress lock waits for them.
        self.is_urgent = False
        #: An eventfd, readable if there is something to do. Other ranks write to it too.
        self.wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        #: Expires when submitted requests have waited for the cycle time.
        self.cycle_timer = Timer(cycle_time_s)
        #: Expires when possibly no thread has advanced the engine for a while.
        self.idle_timer = Timer(_REST_S)

    # ---- the user's threads -----------------------------------------------------------------------------------------

    def submit(self, request: Request, *, is_waited_for: bool) -> None:
        """Submit a request, to be negotiated after the cycle time or when waited for.

        Args:
            request: the request.
            is_waited_for: the caller waits for it next, so no timer is needed.

        Raises:
            DuplicateNameError: one of this name is not done yet.
            ValueError: this rank is in a join().
            WorldEndedError: the world has ended.
        """
        with self._lock:
            if self._end is not None:
                raise WorldEndedError(self._end)
            if self.joined_s is not None:
                raise ValueError(f"{request.name!r} was submitted while a join() of this rank is under way")
            family = key = request.key
            number = -1
            if request.is_unnamed:
                number = self._numbers.get(family, 0)
                request.name = f"{request.name}.{SerialNumber(self.num_joins, number)}"
                request.is_unnamed = False
                key = request.key
            if key in self._pending or key in self._in_use:
                if request.is_ordered:
                    self._held.setdefault(key, deque()).append(request)
                    return
                raise DuplicateNameError(f"{DUPLICATE_NAME_TEXT} (tensor {request.name!r})")
            # Only what is accepted takes a number: an operation that one rank alone refuses shifts none. Nothing is
            # called before the last line, so a signal handler's exception comes before all of this or after it.
            self._pending[key] = request
            if number >= 0:
                self._numbers[family] = number + 1
            self._submitted.append(request)
            self.expires_s = min(self.expires_s, request.submitted_s + request.timeout_s)
            self.submitter = threading.get_ident()
            if not (is_waited_for or request.is_ordered):
                self.cycle_timer.start()

    def next_number(self, process_set_id: SetId, family: str) -> SerialNumber:
        """A family's next number of unnamed operations; new worlds restart the count."""
        with self._lock:
            number = self._numbers.get((process_set_id, family), 0)
            self._numbers[process_set_id, family] = number + 1
            return SerialNumber(self.num_joins, number)

    def join(self, handle: Handle, device: int) -> None:
        """This rank has run out of data; raises ``ValueError`` if it has joined already."""
        with self._lock:
            if self.joined_s is not None:
                raise ValueError("join() was called while another join() of this rank is under way")
            if self._end is not None:
                handle.fail(WorldEndedError(self._end))
                return
            self.joined_s = time.monotonic()
            self._commands.append(Join(handle, device))
        self.wake()

    def command(self, command: Command) -> None:
        """Submit a command; ignored if the world has ended."""
        with self._lock:
            if self._end is None:
                self._commands.append(command)
        self.wake()

    def wake(self) -> None:
        """Wake the engine's thread."""
        with self._lock:
            if self.wakeup >= 0:
                os.eventfd_write(self.wakeup, 1)

    # ---- the progress thread ----------------------------------------------------------------------------------------

    def register(self, poll: select.epoll) -> None:
        """Have the poll report what :meth:`handle_event` handles."""
        for descriptor in (self.wakeup, self.cycle_timer.descriptor, self.idle_timer.descriptor):
            poll.register(descriptor, select.EPOLLIN)

    def handle_event(self, descriptor: int) -> None:
        """The poll has reported this descriptor."""
        if descriptor == self.wakeup:
            self.clear_wakeup()
        elif descriptor == self.cycle_timer.descriptor:
            self.end_cycle()
        elif descriptor == self.idle_timer.descriptor:
            self.idle_timer.clear()

    def clear_wakeup(self) -> None:
        """Reset the wakeup descriptor; call this before looking at what there is."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.wakeup)

    def end_cycle(self) -> bool:
        """Handle the timer's end: requests that waited as long are urgent; True if any.

        If it was started for older requests that were negotiated meanwhile, it is restarted for the present ones.
        """
        with self._lock:
            self.cycle_timer.clear()
            if not self._submitted:
                return False
            waited_s = time.monotonic() - self._submitted[0].submitted_s
            if waited_s < self.cycle_timer.delay_s:
                self.cycle_timer.start(ago_s=waited_s)
                return False
            self.is_urgent = True
            return True

    @property
    def has_submitted(self) -> bool:
        """There are requests to negotiate."""
        return bool(self._submitted)

    def take_submitted(self) -> list[Request]:
        """The requests to negotiate, in the order of submission; they stay pending."""
        with self._lock:
            submitted, self._submitted = self._submitted, []
            self.is_urgent = False
        return submitted

    @property
    def has_commands(self) -> bool:
        """There are commands to execute."""
        return bool(self._commands)

    def take_command(self) -> Command | None:
        """The next command, or None; if it ends the world, :meth:`end` finds later ones."""
        with self._lock:
            return self._commands.popleft() if self._commands else None

    @property
    def has_pending(self) -> bool:
        """There are requests that are not decided."""
        return bool(self._pending)

    def pending(self) -> dict[Key, Request]:
        """The requests that are not decided yet, in the order of submission."""
        with self._lock:
            return dict(self._pending)

    def oldest_pending(self) -> Request | None:
        """The one of :meth:`pending` for which this rank has waited longest, or None."""
        if not self._pending:
            return None
        with self._lock:
            oldest = None
            for request in self._pending.values():
                if request.since_s < (math.inf if oldest is None else oldest.since_s):
                    oldest = request
                if request.awaited_since is None:  # this rank waits for later ones since later
                    break
            return oldest

    def decide(self, key: Key) -> Request | None:
        """Take a request out of the pending ones; None if this rank has not submitted it."""
        with self._lock:
            request = self._pending.pop(key, None)
            self._submit_held([key])
        self._remember([key])
        return request

    def begin(self, keys: list[Key]) -> list[Request | None]:
        """:meth:`decide` for several keys, whose names are in use until :meth:`finish`."""
        with self._lock:
            self._in_use.update(keys)
            pop = self._pending.pop
            requests = [pop(key, None) for key in keys]
        self._remember(keys)
        return requests

    def _remember(self, keys: Sequence[Key]) -> None:
        if len(self._decided) > _MAX_DECIDED:
            self._decided, self._decided_before = {}, self._decided
        for key in keys:
            self._decided[key] = self.num_decisions

    def has_decided(self, key: Key, position: int) -> bool:
        """Whether a decision on ``key`` was executed after log position ``position``."""
        return self._decided.get(key, self._decided_before.get(key, 0)) > position

    def finish(self, keys: Sequence[Key]) -> None:
        """These were executed: their names may be used again."""
        with self._lock:
            self._in_use.difference_update(keys)
            self._submit_held(keys)
        process_set_id, name = keys[-1]
        self.last_finished[process_set_id] = (name, time.monotonic())

    def _submit_held(self, keys: Sequence[Key]) -> None:
        """Submit ordered requests that wait for these names, now free; needs the lock."""
        if not self._held:
            return
        for key in keys:
            if waiting := self._held.get(key):
                request = self._pending[key] = waiting.popleft()
                self._submitted.append(request)
                request.released_s = time.monotonic()
                self.expires_s = min(self.expires_s, request.released_s + request.timeout_s)
                self.is_urgent = True
                self.wake()
                if not waiting:
                    del self._held[key]

    def describe_expired(self, now_s: float) -> str | None:
        """Why the world ends if a request has expired: how long it waited, and for what."""
        if now_s < self.expires_s:
            return None
        with self._lock:
            deadlines = [(request, request.expires_s) for request in self._pending.values()]
            # One that no caller waits for may be waited for from now on.
            earliest = (min(at_s, now_s + request.timeout_s) for request, at_s in deadlines)
            self.expires_s = min(earliest, default=math.inf)
        for request, at_s in deadlines:
            if at_s <= now_s:
                waited_s = now_s - at_s + request.timeout_s
                return f"{waited_s:.0f} s, the timeout of the call, for other ranks to call {request.name}"
        return None

    def withdraw(self, process_set_id: SetId) -> list[Request]:
        """Take the requests of a process set out of the pending ones."""
        with self._lock:
            self._submitted = [r for r in self._submitted if r.process_set_id != process_set_id]
            return [self._pending.pop(key) for key in list(self._pending) if key[0] == process_set_id]

    def end_join(self) -> None:
        """Note that all ranks have joined: this one may submit, and counts from 0 again."""
        with self._lock:
            self.num_joins += 1
            self._numbers.clear()
            self.joined_s = None
        self._remember([JOIN])

    def end(self, text: str) -> None:
        """End the world: fail what is pending, and all later submissions, with ``text``."""
        with self._lock:
            self._end = text
            self.joined_s = None
            failing = [request.handle for request in self._pending.values()]
            failing += [request.handle for waiting in self._held.values() for request in waiting]
            failing += [command.handle for command in self._commands if isinstance(command, Join)]
            self._commands = deque(command for command in self._commands if not isinstance(command, Join))
            self._pending.clear()
            self._held.clear()
            self._submitted.clear()
            self.expires_s = math.inf
        for handle in failing:
            handle.fail(WorldEndedError(text))

    def abandon(self) -> None:
        """Close the descriptors in a forked child, without the lock that is held forever."""
        wakeup, self.wakeup = self.wakeup, -1
        if wakeup >= 0:
            os.close(wakeup)
        self.cycle_timer.close()
        self.idle_timer.close()

    def close(self) -> None:
        """Close the descriptors."""
        with self._lock:
            self.abandon()
