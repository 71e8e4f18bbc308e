"""Shows where the workers of a test are when it reaches its time limit: a hang is seldom in pytest's own process."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Generator
from types import FrameType

import leaks
import pytest

#: Seconds for a worker's stack to arrive here, through the launcher's threads.
WAIT_S = 1.0


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer(item: pytest.Item) -> Generator[None, object, object]:
    before = signal.getsignal(signal.SIGALRM)
    result = yield
    fail = signal.getsignal(signal.SIGALRM)
    if callable(fail) and fail is not before:

        def show_and_fail(number: int, frame: FrameType | None) -> None:
            __tracebackhide__ = True
            show_stacks()
            fail(number, frame)

        signal.signal(signal.SIGALRM, show_and_fail)
    return result


def show_stacks() -> None:
    """Have each worker of this session write the stack of its main thread to its stderr."""
    from hvd_cluster.launch.child import STACK_SIGNAL, _has_signal

    for process, _ in leaks.processes():
        if _has_signal(process.pid, "SigCgt"):  # it would end one that is still starting
            with contextlib.suppress(OSError):
                os.kill(process.pid, STACK_SIGNAL)
    time.sleep(WAIT_S)
