"""A child process with its output in lines, in a process group of its own that ends with it."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import selectors
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence

from hvd_cluster.launch import guard
from hvd_cluster.launch.logs import LineSplitter, OnLine, Tail

logger = logging.getLogger(__name__)

_READ_BYTES = 1 << 16
_CATCH_UP = b"c"


class ChildProcess:
    """One running program.

    Two threads serve it: one forks it, waits for its end and buries it; the other reads its output. That the first one
    forks is needed for :mod:`hvd_cluster.launch.leash`: the child would be killed when a short-lived thread that had
    forked it ended.

    Args:
        rank: names the child in ``on_line``.
        argv: the program and its arguments.
        environment: its whole environment.
        cwd: its working directory.
        pass_fds: descriptors that it inherits.
        stdin: a descriptor from which it reads its input; it reads nothing by default.
        on_line: gets every line of its output.
        on_exit: called once, from a thread, when the process and its group are gone and all output has been passed on.
    """

    def __init__(
        self,
        rank: int,
        argv: Sequence[str],
        environment: Mapping[str, str],
        *,
        cwd: str | None = None,
        pass_fds: Sequence[int] = (),
        stdin: int = subprocess.DEVNULL,
        on_line: OnLine,
        on_exit: Callable[[int], None],
    ) -> None:
        self.rank = rank
        #: The process's id, and its group's; 0 before :meth:`start`.
        self.pid = 0
        #: The last lines of its output.
        self.tail = Tail()
        self._argv = list(argv)
        self._environment = dict(environment)
        self._cwd = cwd
        self._pass_fds = tuple(pass_fds)
        self._stdin = stdin
        self._on_line = on_line
        self._on_exit = on_exit
        self._started: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self._burial = threading.Lock()
        self._buried = False
        self._control = -1
        self._caught_up: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._supervise, name=f"hvd-child-{rank}", daemon=True)

    def start(self) -> None:
        """Start the program.

        Raises:
            OSError: it cannot be started.
            TypeError, ValueError: an argument or a variable is no text that a program could be given.
        """
        self._thread.start()
        error = self._started.get()
        if error is not None:
            self._thread.join()
            raise error

    def signal(self, number: int) -> None:
        """Send a signal to the child's process group; nothing happens when it has ended."""
        with self._burial, contextlib.suppress(ProcessLookupError, PermissionError):
            if self.pid and not self._buried:  # group 0 would be our own
                os.killpg(self.pid, number)

    def catch_up(self) -> None:
        """Return when everything that the child has written by now has been passed on."""
        with self._burial:
            if self._buried or self._control < 0:
                return
            os.write(self._control, _CATCH_UP)
        self._caught_up.get()

    def join(self) -> None:
        """Wait until the process is gone and ``on_exit`` has returned."""
        self._thread.join()

    def _supervise(self) -> None:
        try:
            process = subprocess.Popen(
                self._argv,
                env=self._environment,
                cwd=self._cwd,
                pass_fds=self._pass_fds,
                stdin=self._stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except Exception as error:  # noqa: BLE001 - raised again in the thread that asked for the start
            self._started.put(error)
            return
        self.pid = process.pid
        guard.hold(process.pid)
        control_reader, self._control = os.pipe()
        reader = threading.Thread(
            target=self._read, args=(process, control_reader), name=f"hvd-output-{self.rank}", daemon=True
        )
        reader.start()
        self._started.put(None)
        with contextlib.suppress(ChildProcessError):  # somebody else in this program reaped it
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        # Not reaped yet, so the group's id cannot belong to anybody else: end what the child has left behind.
        self.signal(signal.SIGKILL)
        guard.release(process.pid)
        with self._burial:
            exit_code = process.wait()
            self._buried = True
            os.close(self._control)
        reader.join()
        self._on_exit(exit_code)

    def _read(self, process: subprocess.Popen[bytes], control: int) -> None:
        """Pass the output on until the child has ended; what escaped its group may hold the streams open longer."""
        splitters = {"stdout": LineSplitter(), "stderr": LineSplitter()}
        with selectors.DefaultSelector() as selector:
            selector.register(control, selectors.EVENT_READ)
            for name, pipe in (("stdout", process.stdout), ("stderr", process.stderr)):
                assert pipe is not None
                os.set_blocking(pipe.fileno(), False)
                selector.register(pipe, selectors.EVENT_READ, name)
            over = False
            while not over:
                ready = [key for key, _ in selector.select()]
                requests = os.read(control, _READ_BYTES) if any(key.data is None for key in ready) else None
                over = requests == b""
                everything = requests is not None
                for key in list(selector.get_map().values()) if everything else ready:
                    if key.data is not None and not self._drain(key.fd, key.data, splitters[key.data], everything):
                        selector.unregister(key.fileobj)
                for _ in requests or b"":
                    self._caught_up.put(None)
        for name, splitter in splitters.items():
            self._pass_on(name, splitter.flush())
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        os.close(control)

    def _drain(self, descriptor: int, stream: str, splitter: LineSplitter, everything: bool) -> bool:
        """Read once, or all that is there; False at the end of the stream."""
        while True:
            try:
                data = os.read(descriptor, _READ_BYTES)
            except BlockingIOError:
                return True
            self._pass_on(stream, splitter.feed(data))
            if not data:
                return False
            if not everything:
                return True

    def _pass_on(self, stream: str, lines: Sequence[str]) -> None:
        for line in lines:
            self.tail.add(line)
            try:
                self._on_line(self.rank, stream, line)
            except Exception:  # a caller's broken sink must not block the worker on a full pipe
                logger.exception("a line of rank %d could not be passed on", self.rank)
