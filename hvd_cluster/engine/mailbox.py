"""What the user's threads hand to the engine's thread, under one lock, and the bell that wakes it."""

from __future__ import annotations

import os
import threading
from collections import deque
from contextlib import suppress
from typing import Any

from hvd_cluster.engine.request import Handle, Key, Request
from hvd_cluster.errors import DUPLICATE_NAME_TEXT, HorovodInternalError

#: What to do besides requests: ("join", (handle, device)), ("leave", None), ("timeline", arguments), ("abort", text).
Command = tuple[str, Any]


class Mailbox:
    """Requests and commands on their way to the engine, and the requests that are not decided yet."""

    def __init__(self) -> None:
        # A signal handler may submit while its own thread is in here.
        self._lock = threading.RLock()
        self._has_joined = False
        self._pending: dict[Key, Request] = {}
        self._submitted: deque[Request] = deque()
        self._commands: deque[Command] = deque()
        self._end: str | None = None
        #: Somebody waits for what was submitted.
        self.is_urgent = False
        #: Readable when there is something to take.
        self.bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    # ---- the user's threads -----------------------------------------------------------------------------------------

    def submit(self, request: Request, *, urgent: bool) -> None:
        """Hand in a request.

        Raises:
            ValueError: one of this name is not decided yet.
            HorovodInternalError: the world has ended.
        """
        with self._lock:
            if self._end is not None:
                raise HorovodInternalError(self._end)
            if self._has_joined:
                raise ValueError(f"{request.name!r} was submitted while a join() of this rank is under way")
            if request.key in self._pending:
                raise ValueError(f"{DUPLICATE_NAME_TEXT} (tensor {request.name!r})")
            self._pending[request.key] = request
            self._submitted.append(request)
            self.is_urgent |= urgent
            must_ring = urgent or len(self._submitted) == 1
        if must_ring:
            self.ring()

    def join(self, handle: Handle, device: int) -> None:
        """Hand in that this rank has run out of data; raises ``ValueError`` when it has said so already."""
        with self._lock:
            if self._has_joined:
                raise ValueError("join() was called while another join() of this rank is under way")
            if self._end is not None:
                handle.fail(HorovodInternalError(self._end))
                return
            self._has_joined = True
            self._commands.append(("join", (handle, device)))
        self.ring()

    def command(self, name: str, argument: Any = None) -> None:
        """Hand in a command; the world may have ended already."""
        with self._lock:
            if self._end is None:
                self._commands.append((name, argument))
        self.ring()

    def hurry(self) -> None:
        """Somebody waits for what was submitted."""
        if self._submitted:
            self.is_urgent = True
            self.ring()

    def ring(self) -> None:
        """Wake the engine's thread."""
        with self._lock:
            if self.bell >= 0:
                os.eventfd_write(self.bell, 1)

    # ---- the engine's thread ----------------------------------------------------------------------------------------

    def silence(self) -> None:
        """Take note of the bell, before looking at what is there."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.bell)

    @property
    def has_submitted(self) -> bool:
        """Requests wait to be negotiated."""
        return bool(self._submitted)

    @property
    def has_ended(self) -> bool:
        """:meth:`end` was called."""
        return self._end is not None

    def take_submitted(self) -> list[Request]:
        """The requests to negotiate, in the order of submission; they stay pending."""
        with self._lock:
            self.is_urgent = False
            submitted = list(self._submitted)
            self._submitted.clear()
        return submitted

    def take_commands(self) -> list[Command]:
        """The commands, in their order."""
        with self._lock:
            commands = list(self._commands)
            self._commands.clear()
        return commands

    def pending(self) -> dict[Key, Request]:
        """The requests that are not decided yet, in the order of submission."""
        with self._lock:
            return dict(self._pending)

    def decide(self, key: Key) -> Request | None:
        """This request is pending no longer; None if this rank has not submitted it."""
        with self._lock:
            return self._pending.pop(key, None)

    def withdraw(self, process_set_id: int) -> list[Request]:
        """The requests of a process set are pending no longer."""
        with self._lock:
            self._submitted = deque(r for r in self._submitted if r.process_set_id != process_set_id)
            return [self._pending.pop(key) for key in list(self._pending) if key[0] == process_set_id]

    def unjoin(self) -> None:
        """All ranks have joined: this one may submit again."""
        with self._lock:
            self._has_joined = False

    def end(self, text: str) -> None:
        """The world has ended: fail what is pending, and whatever comes from now on, with ``text``."""
        with self._lock:
            self._end = text
            self._has_joined = False
            pending = list(self._pending.values())
            self._pending.clear()
            self._submitted.clear()
        for request in pending:
            request.handle.fail(HorovodInternalError(text))

    def abandon(self) -> None:
        """Give back the bell in a forked child, where another thread's hold on the lock would never end."""
        bell, self.bell = self.bell, -1
        if bell >= 0:
            os.close(bell)

    def close(self) -> None:
        """Give back the bell."""
        with self._lock:
            self.abandon()
