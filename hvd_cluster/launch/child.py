"""A child process in its own process group, with its output in lines."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from hvd_cluster.launch import guard
from hvd_cluster.launch.logs import OnLine, Tail
from hvd_cluster.launch.output import OutputReader

logger = logging.getLogger(__name__)

#: Makes a worker write the Python stack of its main thread to its standard error, also inside a C call.
STACK_SIGNAL = signal.SIGRTMIN + 9
#: How long a worker gets for that.
_STACK_S = 1.0
#: Seconds that the processes that a child has left behind get to end before SIGKILL. Python's resource tracker, which
#: ignores SIGTERM, unlinks shared memory and semaphores in ``/dev/shm`` when all processes that use it have ended.
_GROUP_GRACE_S = 2.0


class ChildProcess:
    """A running program.

    Two threads serve it: one forks it, waits for its end and reaps it; the other reads its output. The waiting thread
    must also fork, because :mod:`hvd_cluster.launch.die_with_parent` kills the child when the forking thread ends.

    Args:
        stdin: a descriptor for its standard input; by default it is empty.
        on_line: called with every line of its output.
        on_exit: called once, from a thread, when the process group has ended and all output has been passed on, with
            the exit code: a negative one is a signal, and None was taken by other code of this program.
    """

    def __init__(
        self,
        rank: int,
        argv: Sequence[str],
        environment: Mapping[str, str],
        *,
        pass_fds: Sequence[int] = (),
        stdin: int = subprocess.DEVNULL,
        on_line: OnLine,
        on_exit: Callable[[int | None], None],
    ) -> None:
        self.rank = rank
        #: The process id, which is also the process group's; 0 before :meth:`start`.
        self.pid = 0
        #: ``time.time()`` when it ended; 0 while it runs. What it has left behind may run a little longer.
        self.ended_at = 0.0
        #: The last lines of its output.
        self.tail = Tail()
        self._argv = list(argv)
        self._environment = dict(environment)
        self._pass_fds = tuple(pass_fds)
        self._stdin = stdin
        self._on_line = on_line
        self._on_exit = on_exit
        self._started: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self._reap_lock = threading.Lock()
        self._reaped = False
        self._output: OutputReader | None = None
        self._stack_deadline_s = 0.0
        self._thread = threading.Thread(target=self._supervise, name=f"hvd-child-{rank}", daemon=True)

    def start(self) -> None:
        """Start the program.

        Raises:
            OSError: it cannot be started, or its output cannot be read.
            TypeError, ValueError: an argument or a variable is not a string that can be passed to a program.
        """
        self._thread.start()
        error = self._started.get()
        if error is not None:
            self._thread.join()
            raise error

    def signal(self, number: int) -> None:
        """Send a signal to the child's process group; no effect after it has ended.

        Only SIGKILL does not wait for the child to have written its stack, if that was requested.
        """
        while number != signal.SIGKILL and time.monotonic() < self._stack_deadline_s and self._is_writing_stack():
            time.sleep(0.01)
        with self._reap_lock, contextlib.suppress(ProcessLookupError, PermissionError):
            if self.pid and not self._reaped:  # group 0 would be this process's own
                os.killpg(self.pid, number)

    def write_stack(self) -> None:
        """Have it write its Python stack to its standard error; does not wait.

        It must handle :data:`STACK_SIGNAL`.
        """
        with self._reap_lock, contextlib.suppress(ProcessLookupError, PermissionError):
            if self.pid and not self._reaped and _has_signal(self.pid, "SigCgt"):
                os.kill(self.pid, STACK_SIGNAL)
                self._stack_deadline_s = time.monotonic() + _STACK_S

    def _is_writing_stack(self) -> bool:
        """Whether the signal is on its way, or its handler runs.

        The kernel blocks the signal while the handler runs.
        """
        return _has_signal(self.pid, "ShdPnd") or _has_signal(self.pid, "SigBlk")

    def catch_up(self) -> None:
        """Return when all output that the child has written so far has been passed on."""
        with self._reap_lock:
            if self._reaped or self._output is None:
                return
            wait = self._output.catch_up()
        wait()

    def join(self) -> None:
        """Wait until the process is gone and ``on_exit`` has returned."""
        self._thread.join()

    def _supervise(self) -> None:
        try:
            process, output = self._fork()
        except Exception as error:  # noqa: BLE001 - raised again in the thread that asked for the start
            self._started.put(error)
            return
        self._output = output
        self._started.put(None)
        exit_code: int | None = None
        # This fails if the program ignores SIGCHLD, or if other code in it has reaped the child: then the code is lost,
        # and the group's id may be another one's already.
        with contextlib.suppress(ChildProcessError):
            ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            assert ended is not None
            self.ended_at = time.time()
            exit_code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
            self._end_group()
        guard.release(process.pid)
        with self._reap_lock:
            process.wait()
            self._reaped = True
            output.end()
        output.join()
        self._on_exit(exit_code)

    def _end_group(self) -> None:
        """End the processes that the child has left behind.

        It is not reaped yet, so the group's id is not reused.
        """
        left: list[int] = []
        with contextlib.suppress(OSError):  # too many open files
            left = _living(self.pid, (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()))
        if left:
            self.signal(signal.SIGTERM)
        deadline_s = time.monotonic() + _GROUP_GRACE_S
        while left and time.monotonic() < deadline_s:
            time.sleep(0.01)
            left = _living(self.pid, left)
        self.signal(signal.SIGKILL)

    def _fork(self) -> tuple[subprocess.Popen[bytes], OutputReader]:
        with contextlib.ExitStack() as on_failure:
            process = subprocess.Popen(
                self._argv,
                env=self._environment,
                pass_fds=self._pass_fds,
                stdin=self._stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
            on_failure.callback(process.wait)
            on_failure.callback(os.killpg, process.pid, signal.SIGKILL)
            guard.hold(process.pid)
            on_failure.callback(guard.release, process.pid)
            assert process.stdout is not None
            assert process.stderr is not None
            pipes: dict[str, int] = {}
            # The reader gets copies of the descriptors because it may outlive the pipe objects.
            with process.stdout as stdout, process.stderr as stderr:
                for name, pipe in (("stdout", stdout), ("stderr", stderr)):
                    pipes[name] = os.dup(pipe.fileno())
                    on_failure.callback(os.close, pipes[name])
            output = OutputReader(pipes, self._pass_on, f"hvd-output-{self.rank}")
            on_failure.pop_all()
        self.pid = process.pid
        return process, output

    def _pass_on(self, stream: str, lines: Sequence[str]) -> None:
        for line in lines:
            self.tail.add(line)
            try:
                self._on_line(self.rank, stream, line)
            except Exception:  # a caller's broken sink must not block the worker on a full pipe
                logger.exception("a line of rank %d could not be passed on", self.rank)


def _living(group: int, pids: Iterable[int]) -> list[int]:
    """Those of some processes that are in a group and are not zombies."""
    found: list[int] = []
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            if os.getpgid(pid) == group and Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2][:1] != b"Z":
                found.append(pid)
    return found


def _has_signal(pid: int, mask: str) -> bool:
    """Whether :data:`STACK_SIGNAL` is in a mask of ``/proc/PID/status``.

    In "SigCgt" it means that there is a handler.
    """
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
            if line.startswith(f"{mask}:"):
                return bool(int(line.split()[1], 16) >> (STACK_SIGNAL - 1) & 1)
    return False
