"""Shows where the processes of a test are when it reaches its time limit: a hang is seldom in pytest's own process."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from types import FrameType

import leaks
import pytest

PY_SPY = str(Path(sys.executable).with_name("py-spy"))
#: Seconds that py-spy may take for one process.
DUMP_S = 10


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer(item: pytest.Item) -> Generator[None, object, object]:
    before = signal.getsignal(signal.SIGALRM)
    result = yield
    fail = signal.getsignal(signal.SIGALRM)
    if callable(fail) and fail is not before:

        def dump_and_fail(number: int, frame: FrameType | None) -> None:
            for text in stacks():
                print(text, file=sys.stderr)
            fail(number, frame)

        signal.signal(signal.SIGALRM, dump_and_fail)
    return result


def stacks() -> list[str]:
    """The stacks of every descendant of this session that runs our code, orphans included."""
    found = []
    for process, _ in leaks.processes():
        try:
            dump = subprocess.run(
                [PY_SPY, "dump", "--pid", str(process.pid)], capture_output=True, text=True, timeout=DUMP_S, check=True
            )
        except (OSError, subprocess.SubprocessError):
            continue  # not Python, or it has ended, or we may not look
        if "hvd_cluster" in dump.stdout:
            found.append(dump.stdout)
    return found
