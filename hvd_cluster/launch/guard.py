"""Kills the workers' process groups when this process dies of SIGKILL or a crash.

The kernel kills a worker with its parent (:mod:`hvd_cluster.launch.die_with_parent`), but not the processes that the
worker has started. Therefore a small guard process holds the list of groups and the reading end of a pipe; when the
pipe closes, it kills the groups. One guard serves all workers of this process; without workers there is none.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import threading

logger = logging.getLogger(__name__)

#: A text, because this package may be in a zip file. "+7" holds the group 7, "-7" releases it.
_PROGRAM = """\
# guard of hvd_cluster: kills process groups whose launcher has died
import os, signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
held = set()
for line in sys.stdin:
    (held.add if line[0] == "+" else held.discard)(int(line[1:]))
for group in held:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
"""

_lock = threading.Lock()
_held: set[int] = set()
_process: subprocess.Popen[str] | None = None


def hold(group: int) -> None:
    """Kill the process group ``group`` if this process dies."""
    global _process
    with _lock:
        _held.add(group)
        if _process is None:
            try:
                _process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", _PROGRAM],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                    text=True,
                )
            except OSError as error:  # the workers themselves still die with this process
                logger.warning("the guard for processes that workers start cannot be started: %s", error)
                return
        _send(f"+{group}")


def release(group: int) -> None:
    """The process group ``group`` has ended."""
    global _process
    with _lock:
        _held.discard(group)
        if _process is None:
            return
        _send(f"-{group}")
        if not _held:
            _process.kill()  # it holds nothing, so do not wait until it has read the line
            _process.communicate()
            _process = None


def _send(line: str) -> None:
    assert _process is not None
    assert _process.stdin is not None
    try:
        _process.stdin.write(line + "\n")
        _process.stdin.flush()
    except OSError as error:
        logger.warning("the guard for processes that workers start has died: %s", error)
