"""Makes this process die with its parent.

Also a program that does so and then runs another program::

    python -I -S die_with_parent.py PARENT_PID COMMAND ARGUMENT...

The kernel sends PR_SET_PDEATHSIG when the *thread* that forked ends, not when its process does. Therefore such a
process must be forked by a thread that lives as long as the child: in :class:`hvd_cluster.launch.child.ChildProcess` it
is the thread that waits for the child. The setting survives exec but not fork: children of the child do not have it. It
is set here, after exec, because Python code between fork and exec may deadlock if other threads hold locks.
"""

from __future__ import annotations

import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int, *, notices_its_end: bool = False) -> None:
    """Make the kernel kill this process when the thread that forked it ends.

    If it has already ended, die now. Signals that the thread had blocked are let through: SIGTERM must end a worker.

    On systems other than Linux this has no effect; there the closed channel to the driver ends the process.

    Args:
        parent_pid: the process that should have forked this one.
        notices_its_end: this process also notices the parent's end by other means, so a third process may be between
            them.
    """
    import ctypes  # here, because launchers import this module only for its path

    signal.pthread_sigmask(signal.SIG_SETMASK, ())
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
    """Run ``arguments[1:]`` as a program that dies with the process ``arguments[0]``."""
    command = arguments[1:]
    die_with_parent(int(arguments[0]))
    for ignored_by_python in (signal.SIGPIPE, signal.SIGXFSZ):  # exec would pass that on
        signal.signal(ignored_by_python, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"cannot start {command[0]}: {error.strerror}\n")
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


if __name__ == "__main__":
    main(sys.argv[1:])
