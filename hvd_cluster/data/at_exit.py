"""Closes what works in threads while the interpreter is still there.

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
    """What has threads of its own, or is asked by those of others."""

    def close(self, timeout_s: float | None = None) -> None:
        """End what is under way, and wait for that so long at most; 0 only says so. It may be called again.

        The code that sees the end calls ``forget``.
        """


#: In the order in which they were made: who asks comes before what it makes for that.
_open: weakref.WeakValueDictionary[int, Closes] = weakref.WeakValueDictionary()
_is_ending = False
# A forked process has none of the threads.
os.register_at_fork(after_in_child=_open.clear)


def close_at_exit(one: Closes) -> None:
    """Close this one at the end of the interpreter, at once if it has come."""
    _open[id(one)] = one
    if _is_ending:
        one.close(0.0)


def forget(one: Closes) -> None:
    """Nothing of this one is under way any more."""
    _open.pop(id(one), None)


def is_ending() -> bool:
    """Whether the end of the interpreter has come."""
    return _is_ending


@atexit.register
def _close_all() -> None:
    global _is_ending
    _is_ending = True
    deadline = time.monotonic() + _WAIT_S
    _close_each(0.0)  # all are told before the first is waited for: they end side by side
    while _open and (left_s := deadline - time.monotonic()) > 0:  # some may have begun meanwhile
        _close_each(left_s)


def _close_each(timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    for reference in _open.valuerefs():  # a list made at once, as threads come and go
        one = reference()
        if one is not None:
            one.close(max(0.0, deadline - time.monotonic()))
