"""A timer that a poll can wait for: starting it costs one system call."""

from __future__ import annotations

import ctypes
import os
import time
from contextlib import suppress

_CLOEXEC, _NONBLOCK, _CLOCK_MONOTONIC = os.O_CLOEXEC, os.O_NONBLOCK, 1


class _Times(ctypes.Structure):
    """Linux's struct itimerspec."""

    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


# os.timerfd_create came with Python 3.13. The calls return at once, so they keep the interpreter lock.
_libc = ctypes.PyDLL(None, use_errno=True)


class Timer:
    """A Linux timerfd that expires once for each start.

    Args:
        delay_s: from :meth:`start` until :attr:`descriptor` is readable; at least a nanosecond.
    """

    def __init__(self, delay_s: float) -> None:
        self.descriptor: int = _libc.timerfd_create(_CLOCK_MONOTONIC, _CLOEXEC | _NONBLOCK)
        if self.descriptor < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        #: The delay of the next start.
        self.delay_s = delay_s
        self._due_s: float | None = None

    def start(self, ago_s: float = 0.0) -> None:
        """Start the timer, unless it is running already.

        Args:
            ago_s: expire as if it had been started this many seconds ago; less than the delay.
        """
        # Setting a timer takes 20 us on a virtual machine; a stream of small operations need not do so each time.
        if self._due_s is None:
            left_s = self.delay_s - ago_s
            seconds, nanoseconds = divmod(max(1, round(left_s * 1e9)), 1_000_000_000)
            reference = ctypes.byref(_Times(0, 0, seconds, nanoseconds))
            due_s = time.monotonic() + left_s
            # Last, so that an interrupt does not leave a timer that counts as running and never expires.
            self._due_s = due_s
            _libc.timerfd_settime(self.descriptor, 0, reference, None)

    @property
    def is_due(self) -> bool:
        """It has expired, or is about to, and was not cleared."""
        due_s = self._due_s
        return due_s is not None and time.monotonic() >= due_s

    def clear(self) -> None:
        """Reset an expired timer."""
        with suppress(BlockingIOError):
            os.read(self.descriptor, 8)
        # Not before the read: a start in between would be consumed, and the timer would count as running forever.
        self._due_s = None

    def close(self) -> None:
        """Close the descriptor."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
