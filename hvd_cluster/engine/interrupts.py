"""Deferral of signal handlers' exceptions until the main thread only waits.

Python runs a signal handler between any two steps of the main thread. An exception raised there would leave an
operation unfinished, also for the other ranks. So while the main thread works, a wrapper calls each handler, without
delay, and keeps what it raises until the current work is done.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from types import FrameType
from typing import Any

#: How long work that waits for other ranks may defer an exception.
_MAX_DELAY_S = 5.0

_NUMBERS = range(1, signal.NSIG)
# Not the signal module, whose functions make an enum of each number: that takes longer than everything else here.
_signal: Any = import_module("_signal")
_get: Callable[[int], Any] = _signal.getsignal
_set: Callable[[int, Any], Any] = _signal.signal


class _DeferringHandler:
    """Calls a handler and keeps its exception."""

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self.handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        try:
            self.handler(number, frame)
        except BaseException as error:  # whatever it is, it is raised later
            interrupts.keep(error)
            if not interrupts.is_working:
                raise


class Interrupts:
    """What handlers raise while a thread works; only :data:`interrupts` gets any."""

    #: The thread works, so what handlers raise is kept.
    is_working = True
    _is_installed = False
    _kept: BaseException | None = None
    _kept_s = 0.0
    _handlers: Sequence[Any] = ()
    _wrappers: Sequence[tuple[int, _DeferringHandler]] = ()

    def begin(self) -> Interrupts:
        """Keep what handlers raise from now on.

        Returns another object if this is another thread, or if it is kept already.
        """
        if self._is_installed or threading.get_ident() != threading.main_thread().ident:
            return Interrupts()
        handlers = [*map(_get, _NUMBERS)]
        if handlers != self._handlers:
            # A wrapper is found if an exception was raised between the lines of end().
            found = [
                (n, h.handler if isinstance(h, _DeferringHandler) else h)
                for n, h in zip(_NUMBERS, handlers, strict=True)
            ]
            self._wrappers = [(number, _DeferringHandler(handler)) for number, handler in found if callable(handler)]
            self._handlers = handlers
        try:
            self._kept = None
            self._is_installed = self.is_working = True
            for number, wrapper in self._wrappers:
                _set(number, wrapper)
        except BaseException:  # of a handler without a wrapper yet
            self.end()
            raise
        return self

    def end(self) -> None:
        """Raise what was kept; from here on handlers raise at once."""
        self._is_installed = self.is_working = False
        for number, wrapper in self._wrappers:
            if _get(number) is wrapper:  # a handler may have replaced it
                _set(number, wrapper.handler)
        self.release()

    def wait(self) -> None:
        """Raise what was kept, before this thread waits; handlers then raise at once."""
        self.is_working = False
        if self._kept is not None:
            self.release()

    def work(self) -> None:
        """The wait is over."""
        self.is_working = True

    @property
    def has_come(self) -> bool:
        """Whether a handler has raised what :meth:`end` raises, even if it was caught."""
        return self._kept is not None

    def keep(self, error: BaseException) -> None:
        """Raise this later; only the first error is kept."""
        if self._kept is None:
            self._kept, self._kept_s = error, time.monotonic()

    def release(self) -> None:
        """Raise what was kept."""
        if self._kept is not None:
            error, self._kept = self._kept, None
            raise error

    def check(self) -> None:
        """Raise what was kept for too long, once: this ends the wait for other ranks.

        If this thread waits, the error was raised already and something has caught it: raise it again.
        :meth:`end` raises it to the caller.
        """
        if self._kept is None or (self.is_working and time.monotonic() - self._kept_s < _MAX_DELAY_S):
            return
        if threading.get_ident() == threading.main_thread().ident:
            self._kept_s = math.inf
            raise self._kept


interrupts = Interrupts()
