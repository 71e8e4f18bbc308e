"""Reads the output of a program, or of this process, and splits it into lines.

It comes from pipes.
"""

from __future__ import annotations

import contextlib
import os
import queue
import selectors
import sys
import threading
import time
from collections.abc import Callable, Mapping

from hvd_cluster.launch.logs import LineSplitter

_READ_BYTES = 1 << 16
_CATCH_UP = b"c"
#: Seconds between two versions of a line that is being rewritten (a progress bar), which may last for hours.
_VERSION_S = 10.0


def flush_prints() -> None:
    """Flush the user's stdout and stderr, if possible."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the user has closed or replaced it
            stream.flush()


class OutputReader:
    """A thread that passes on the output from pipes, line by line, until :meth:`end`.

    Args:
        pipes: name of the stream -> descriptor of its reading end, which the reader closes at the end.
        on_lines: called, from the thread, with the name of a stream and some of its lines; must not raise.
        version_s: seconds between two versions of a line that a program rewrites with carriage returns.

    Raises:
        OSError: too many files are open; the pipes are then the caller's.
    """

    def __init__(
        self,
        pipes: Mapping[str, int],
        on_lines: Callable[[str, list[str]], None],
        name: str,
        version_s: float = _VERSION_S,
    ) -> None:
        self._pipes = dict(pipes)
        self._on_lines = on_lines
        self._version_s = version_s
        self._version_at_s: float | None = None
        self._caught_up: queue.SimpleQueue[None] = queue.SimpleQueue()
        with contextlib.ExitStack() as on_failure:
            self._selector = on_failure.enter_context(selectors.DefaultSelector())
            self._control_reader, self._control = os.pipe()
            on_failure.callback(os.close, self._control_reader)
            on_failure.callback(os.close, self._control)
            self._selector.register(self._control_reader, selectors.EVENT_READ)
            for stream, descriptor in self._pipes.items():
                os.set_blocking(descriptor, False)
                self._selector.register(descriptor, selectors.EVENT_READ, stream)
            self._thread = threading.Thread(target=self._read, name=name, daemon=True)
            self._thread.start()
            on_failure.pop_all()

    def catch_up(self) -> Callable[[], None]:
        """Return a function that waits until all output so far has been passed on.

        This call itself does not block. It must not be called after :meth:`end`.
        """
        os.write(self._control, _CATCH_UP)
        return self._caught_up.get

    def end(self) -> None:
        """Read what is available, then stop.

        Processes that have escaped from a program may keep its streams open.
        """
        os.close(self._control)

    def join(self) -> None:
        """After :meth:`end`, wait until everything has been passed on."""
        self._thread.join()

    def _read(self) -> None:
        splitters = {name: LineSplitter() for name in self._pipes}
        with self._selector as selector:
            is_closed = False
            while not is_closed:
                ready = [key for key, _ in selector.select(self._until_version(splitters))]
                asked = any(key.data is None for key in ready)
                requests = os.read(self._control_reader, _READ_BYTES) if asked else None
                is_closed = requests == b""
                everything = requests is not None
                for key in list(selector.get_map().values()) if everything else ready:
                    if key.data is not None and not self._drain(key.fd, key.data, splitters[key.data], everything):
                        selector.unregister(key.fileobj)
                for _ in requests or b"":
                    self._caught_up.put(None)
        for name, splitter in splitters.items():
            self._pass_on(name, splitter.flush())
        for descriptor in (*self._pipes.values(), self._control_reader):
            os.close(descriptor)

    def _until_version(self, splitters: Mapping[str, LineSplitter]) -> float | None:
        """Pass on lines that are being rewritten when that is due.

        Returns for how long there is nothing more to do.
        """
        now_s = time.monotonic()
        if self._version_at_s is not None and now_s >= self._version_at_s:
            self._version_at_s = None
            for name, splitter in splitters.items():
                self._pass_on(name, splitter.version())
        if not any(splitter.has_version for splitter in splitters.values()):
            self._version_at_s = None
            return None
        if self._version_at_s is None:
            self._version_at_s = now_s + self._version_s
        return self._version_at_s - now_s

    def _drain(self, descriptor: int, stream: str, splitter: LineSplitter, everything: bool) -> bool:
        """Read once, or everything that is available; False at the end of the stream."""
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

    def _pass_on(self, stream: str, lines: list[str]) -> None:
        if lines:
            self._on_lines(stream, lines)
