"""Ties the life of this process to that of its parent. Also a program: set the tie, then become another program.

    python -I -S die_with_parent.py PARENT_PID COMMAND ARGUMENT...

The kernel sends PR_SET_PDEATHSIG when the *thread* that forked ends, not when its process does. Whoever starts a
such a process must therefore fork in a thread that lives as long as the child:
:class:`hvd_cluster.launch.child.ChildProcess` forks in the very thread that waits for the child. The tie survives exec,
but no fork: children of the child are not tied. It is set here, after exec, because Python code between fork and exec
may deadlock where other threads hold locks.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int, *, notices_its_end: bool = False) -> None:
    """Have the kernel kill this process when the thread that forked it ends; die now if that has happened already.

    Args:
        parent_pid: the process that is to have forked it.
        notices_its_end: this process notices it by other means too, so that there may be a third one between the two.

    Where the system has no such call (it is Linux's), only the closing of the driver's channel tells of its end.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent_pid and not (notices_its_end and _lives(parent_pid)):
        os.kill(os.getpid(), signal.SIGKILL)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def main(arguments: list[str]) -> None:
    """Become ``arguments[1:]``, tied to the process ``arguments[0]``."""
    command = arguments[1:]
    die_with_parent(int(arguments[0]))
    for ignored_by_python in (signal.SIGPIPE, signal.SIGXFSZ):  # exec would hand that on
        signal.signal(ignored_by_python, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"cannot start {command[0]}: {error.strerror}\n")
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


if __name__ == "__main__":
    main(sys.argv[1:])
