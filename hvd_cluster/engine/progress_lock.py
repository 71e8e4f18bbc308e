"""Which thread advances the engine: its own, or one that waits for a result.

Handing work to another thread and back costs two wake-ups, and milliseconds if that thread has to get the interpreter
lock from a busy one. So a thread that waits takes the progress lock and becomes the progress thread: until its own
result is there, or it gives up, it does everything that the engine's thread would do. The engine's thread sleeps and
does not wake for what the progress thread handles, because the inner poll is unregistered from its own while the
progress thread sleeps.
"""

from __future__ import annotations

import math
import select
import threading
import time
from typing import Protocol

from hvd_cluster.engine.interrupts import Interrupts, interrupts
from hvd_cluster.engine.request import Handle
from hvd_cluster.errors import HorovodInternalError

#: How long to wait for the engine's thread before checking again which thread holds the lock.
_RECHECK_S = 0.002


class ProgressEngine(Protocol):
    """What the lock protects.

    Only its holder calls these methods, except :meth:`expedite` and :meth:`wake`.
    """

    def is_done(self) -> bool:
        """Nothing remains to be done."""

    def work(self, *, is_waited_for: bool) -> None:
        """Work without waiting; ``is_waited_for`` if a thread waits for a submission."""

    def spin(self) -> bool:
        """Wait a moment for what usually comes soon; True if there is something to do."""

    def may_sleep(self) -> bool:
        """False if there is work; True guarantees that the poll reports what comes."""

    def hand_over(self) -> None:
        """Have the poll report what comes soon enough: the progress thread leaves."""

    def deadline_s(self) -> float | None:
        """When there is work even if the poll is silent (``time.monotonic()``), or None."""

    def handle_events(self, events: list[tuple[int, int]]) -> None:
        """Handle what the poll has reported."""

    def fail(self, error: BaseException) -> None:
        """The progress thread has failed: end the world."""

    def finish(self) -> None:
        """Nothing remains to be done: release everything."""

    def expedite(self) -> None:
        """Negotiate now: a thread without the lock waits for what it has submitted."""

    def wake(self) -> None:
        """Wake the thread that sleeps in the poll."""


class ProgressLock:
    """Lets one thread at a time advance the engine.

    Args:
        engine: what it advances.
        poll: what the progress thread waits on.
    """

    def __init__(self, engine: ProgressEngine, poll: select.epoll) -> None:
        self._engine = engine
        self._poll = poll
        self._lock = threading.Lock()
        self._holder: int | None = None
        #: Set when the engine's thread ends. (A join() that a signal's exception ends takes the thread for ended.)
        self.has_ended = threading.Event()
        # The engine's thread sleeps on this one. It is ready when the poll is, unless another thread holds the lock.
        self._sleep = select.epoll()
        self._sleep.register(poll.fileno(), select.EPOLLIN)
        self._is_detached = False
        self._wakes_s: float | None = None
        self.thread = threading.Thread(target=self._run, name="hvd-engine", daemon=True)

    @property
    def is_held_here(self) -> bool:
        """This thread holds the lock: it is in a signal handler or a ``__del__``."""
        return self._holder == threading.get_ident()

    def progress_until(self, handle: Handle, give_up_s: float = math.inf) -> None:
        """Advance the engine until it is done or ``handle`` is settled.

        Returns early if another thread advances it.

        Args:
            handle: what this thread waits for.
            give_up_s: ``time.monotonic()`` when it waits no longer.

        Raises:
            HorovodInternalError: this thread does so already: it was called from a signal handler or a ``__del__``.
            BaseException: what a signal handler raises, unchanged, once the current work is done. The world continues
                unless that work has waited too long for other ranks.
        """
        held = interrupts.begin()
        try:
            self._progress_until(handle, give_up_s, held)
        finally:
            held.end()

    def _progress_until(self, handle: Handle, give_up_s: float, held: Interrupts) -> None:
        me = threading.get_ident()
        if not self._get(me, handle, give_up_s, held):
            return
        self._holder = me
        try:
            if self.has_ended.is_set() or handle.settled():
                return
            try:
                while True:
                    self._engine.work(is_waited_for=True)
                    if handle.settled() or self._engine.is_done() or time.monotonic() >= give_up_s:
                        break
                    held.wait()
                    has_news = self._engine.spin()
                    held.work()  # looking once more takes the ballot's lock for a moment
                    if has_news or not self._engine.may_sleep():
                        continue
                    if not self._is_detached:
                        self._sleep.unregister(self._poll)
                        self._is_detached = True
                    until = _until(self._engine.deadline_s(), give_up_s)
                    held.wait()
                    events = self._poll.poll(until)
                    held.work()
                    self._engine.handle_events(events)
            except Exception as error:  # whatever it was, every rank must learn of it
                if not held.is_working:
                    raise  # a signal handler's
                # The waiters learn of it through their handles.
                self._engine.fail(error)
                self._engine.wake()
            except BaseException as error:  # raised again: an interrupt in mid-operation has left it undone
                if held.is_working:
                    self._engine.fail(error)
                    self._engine.wake()
                raise
            finally:
                held.work()
                self._leave()
        finally:
            self._holder = None
            self._lock.release()

    def _get(self, me: int, handle: Handle, give_up_s: float, held: Interrupts) -> bool:
        """Get the lock; False if another waiter has it, or if the wait ends meanwhile."""
        if self._lock.acquire(blocking=False):
            return True
        if self.is_held_here:
            raise HorovodInternalError(
                "an operation was waited for from within another one of the same thread, by a signal handler or a "
                "__del__: it would wait for itself"
            )
        # The progress thread may sleep without having seen what this thread waits for.
        self._engine.expedite()
        # The engine's thread releases the lock soon. A waiter releases it with its own result, which may depend on what
        # this thread does next: so never wait for a waiter. (None: the holder is not known yet.)
        while self._holder in (self.thread.ident, None):
            held.release()
            if self._lock.acquire(timeout=_RECHECK_S):
                return True
            if handle.settled() or time.monotonic() >= give_up_s:
                return False
        return False

    def _leave(self) -> None:
        """Let the engine's thread take over."""
        try:
            deadline_s = self._engine.deadline_s()
            is_earlier = deadline_s is not None and (self._wakes_s is None or deadline_s < self._wakes_s)
            if is_earlier or self._engine.is_done():
                self._engine.wake()
            else:
                self._engine.hand_over()
        except Exception as error:  # noqa: BLE001 - as above: another rank may have died holding the ballot's lock
            self._engine.fail(error)
            self._engine.wake()
        except BaseException as error:  # raised again: what should wake the engine's thread may be consumed already
            self._engine.fail(error)
            self._engine.wake()
            raise
        finally:
            if self._is_detached:
                self._is_detached = False
                self._sleep.register(self._poll, select.EPOLLIN)

    def abandon(self) -> None:
        """Close the descriptors in a forked child, in which the thread does not exist."""
        self._sleep.close()
        self._poll.close()

    def _run(self) -> None:
        try:
            self._loop()
        finally:
            self.has_ended.set()  # however the thread ends: shutdown() waits for it

    def _loop(self) -> None:
        while True:
            with self._lock:
                self._holder = threading.get_ident()
                try:
                    if self._progress():
                        try:
                            self._engine.finish()
                        finally:
                            self._sleep.close()
                            self._poll.close()
                            self.has_ended.set()
                        return
                finally:
                    self._holder = None
            self._sleep.poll(_until(self._wakes_s))

    def _progress(self) -> bool:
        """Do what there is to do; True if nothing remains to be done."""
        try:
            while not self._engine.is_done():
                self._engine.handle_events(self._poll.poll(0))
                self._engine.work(is_waited_for=False)
                if not self._engine.is_done() and self._engine.may_sleep():
                    self._wakes_s = self._engine.deadline_s()
                    return False
        except Exception as error:  # noqa: BLE001 - if the thread died silently, all other ranks would wait
            self._engine.fail(error)
        return True


def _until(deadline_s: float | None, give_up_s: float = math.inf) -> float | None:
    """Seconds until the earlier of two times, or None for never."""
    first_s = give_up_s if deadline_s is None else min(deadline_s, give_up_s)
    return None if first_s == math.inf else max(0.0, first_s - time.monotonic())
