"""Closes objects that own threads while the interpreter is still running.

A thread that comes back from C++ (Arrow, torch) when the interpreter is no more is ended there: the C++ around it ends
the process by SIGABRT, and a thread that waits for it (TensorFlow, for a call of Python) never returns.
"""

from __future__ import annotations

import atexit
import os
import time
import weakref
from typing import Protocol

#: Seconds that the end of the interpreter waits for all of them together.
_WAIT_S = 10.0


class Closes(Protocol):
    """An object that owns threads, or that foreign threads call."""

    def close(self, timeout_s: float | None = None) -> None:
        """End the work in progress, and wait at most ``timeout_s`` for it.

        0 only requests the end. May be repeated. The code that sees the end calls ``forget``.
        """


#: In the order of their creation: a caller comes before the objects that it creates.
_open: weakref.WeakValueDictionary[int, Closes] = weakref.WeakValueDictionary()
_is_ending = False
# A forked process has none of the threads.
os.register_at_fork(after_in_child=_open.clear)


def close_at_exit(one: Closes) -> None:
    """Close an object at the end of the interpreter; at once if that has begun."""
    _open[id(one)] = one
    if _is_ending:
        one.close(0.0)


def forget(one: Closes) -> None:
    """Remove an object that has ended."""
    _open.pop(id(one), None)


def is_ending() -> bool:
    """Whether the end of the interpreter has begun."""
    return _is_ending


@atexit.register
def _close_all() -> None:
    global _is_ending
    _is_ending = True
    deadline = time.monotonic() + _WAIT_S
    _close_each(0.0)  # all get the request before the first wait: they end side by side
    while _open and (left_s := deadline - time.monotonic()) > 0:  # some may have begun meanwhile
        _close_each(left_s)


def _close_each(timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    for reference in _open.valuerefs():  # a list made at once, as threads come and go
        one = reference()
        if one is not None:
            one.close(max(0.0, deadline - time.monotonic()))
