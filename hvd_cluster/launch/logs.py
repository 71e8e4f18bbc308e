"""Splits a worker's output into lines, and prints them with the rank as a prefix."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import select
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import IO, TextIO

logger = logging.getLogger(__name__)

#: Called with a rank, "stdout" or "stderr", and a line without its newline; from several threads at once.
OnLine = Callable[[int, str, str], None]

#: A longer line is cut into parts of this size, so that output without newlines cannot fill the memory.
MAX_LINE_BYTES = 64 * 1024
#: Lines of a worker's call that the driver's output shows by default.
MAX_SHOWN_LINES = 10_000
#: Characters written at once to a non-blocking pipe. The stream's buffer of 4 KiB keeps what the pipe does not accept.
_CHUNK_CHARS = 1000
#: Lines of a worker's output in its failure report.
TAIL_LINES = 30


class LineSplitter:
    """Splits a stream of bytes into lines of text.

    Bytes that are not UTF-8 become U+FFFD. Of a line that is rewritten with carriage returns (a progress bar), only the
    last version is kept, as on a terminal, and the versions for which :meth:`version` is called.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._shown = b""

    def feed(self, data: bytes) -> list[str]:
        """The lines that ``data`` completes."""
        *whole, rest = (self._rest + data).split(b"\n")
        lines = [_decode(line) for line in whole]
        if len(rest) > MAX_LINE_BYTES:
            rest = rest[rest.rfind(b"\r", 0, -1) + 1 :]  # drop what a progress bar has already overwritten
        while len(rest) > MAX_LINE_BYTES:
            lines.append(_decode(rest[:MAX_LINE_BYTES]))
            rest = rest[MAX_LINE_BYTES:]
        self._rest = rest
        return lines

    @property
    def has_version(self) -> bool:
        """Whether a line is being rewritten and has a new :meth:`version`."""
        return b"\r" in self._rest and self._rest != self._shown

    def version(self) -> list[str]:
        """The present version of a line that is being rewritten.

        Empty if there is none that was not returned before.
        """
        if not self.has_version:
            return []
        self._shown = self._rest
        return [_decode(self._rest)]

    def flush(self) -> list[str]:
        """The last line, if the stream ended without a newline."""
        rest, self._rest = self._rest, b""
        return [_decode(rest)] if rest else []


def _decode(line: bytes) -> str:
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", "replace")


class Tail:
    """The last lines of one worker, both streams in order of arrival."""

    def __init__(self, num_lines: int = TAIL_LINES) -> None:
        self._lines: deque[str] = deque(maxlen=num_lines)

    def add(self, line: str) -> None:
        """Remember ``line``, cut to a length suitable for a report."""
        self._lines.append(line[:1000])

    def text(self) -> str:
        """The lines, joined."""
        return "\n".join(self._lines.copy())


def prefixed(rank: int, stream: str, line: str, at: float | None = None) -> str:
    """``[3]<stdout>:line``, preceded by the local time if it is given.

    ``at`` is in seconds since the epoch.
    """
    stamp = "" if at is None else time.strftime("%Y-%m-%d %H:%M:%S ", time.localtime(at))
    return f"{stamp}[{rank}]<{stream}>:{line}"


class LinePrinter:
    """Writes the workers' lines to two streams of the driver. Thread-safe.

    Args:
        stdout: the stream for lines of the workers' stdout; None for the driver's own, looked up at each line because
            notebooks replace it in every cell.
        stderr: the same for stderr.
        with_timestamp: print the time before each line.
        max_lines: lines per rank and call after which the rest is dropped, with a note; None for no limit.
    """

    def __init__(
        self,
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
        *,
        with_timestamp: bool = False,
        max_lines: int | None = None,
    ) -> None:
        self._streams = {"stdout": stdout, "stderr": stderr}
        self._with_timestamp = with_timestamp
        self._max_lines = max_lines
        self._num_lines: Counter[int] = Counter()
        self._lock = threading.Lock()
        #: The streams whose reader is gone.
        self._broken: set[str] = set()

    def begin_call(self) -> None:
        """Count lines from zero again: workers that live on begin another call."""
        with self._lock:
            self._num_lines.clear()

    def __call__(self, rank: int, stream: str, line: str) -> None:
        """Write one line."""
        with self._lock:
            self._num_lines[rank] += 1
            if self._max_lines is not None and self._num_lines[rank] > self._max_lines:
                if self._num_lines[rank] > self._max_lines + 1:
                    return
                line = f"... (more than {self._max_lines} lines; verbose=2 shows the rest of rank {rank})"
            self._write(stream, prefixed(rank, stream, line, time.time() if self._with_timestamp else None) + "\n")

    def _write(self, stream: str, text: str) -> None:
        target: TextIO | None = self._streams[stream] or getattr(sys, stream)
        if target is None or stream in self._broken:
            return
        try:
            if not _is_nonblocking(target):
                _put(target, text)
                target.flush()
                return
            _flush_nonblocking(target)
            for start in range(0, len(text), _CHUNK_CHARS):
                _put(target, text[start : start + _CHUNK_CHARS])
                _flush_nonblocking(target)
        except (OSError, ValueError) as error:  # the reader is gone or the stream is closed; the job continues
            self._broken.add(stream)
            logger.warning("the workers' %s can no longer be written: %s", stream, error)


def _put(target: TextIO, text: str) -> None:
    try:
        target.write(text)
    except UnicodeEncodeError:
        encoding = target.encoding or "ascii"
        target.write(text.encode(encoding, "backslashreplace").decode(encoding))


def _is_nonblocking(target: TextIO) -> bool:
    """Whether the stream is a pipe with O_NONBLOCK.

    Another process that shares it may have set that.
    """
    try:
        return not os.get_blocking(target.fileno())
    except (OSError, ValueError, AttributeError):  # not a file
        return False


def _flush_nonblocking(target: TextIO) -> None:
    while True:
        try:
            target.flush()  # what the pipe does not accept stays in the buffer
            return
        except BlockingIOError:
            room = select.poll()
            room.register(target.fileno(), select.POLLOUT)
            room.poll()


def printer(stdout: TextIO | None, stderr: TextIO | None, *, with_timestamp: bool, verbose: int) -> OnLine:
    """What a launcher does with its workers' lines.

    ``verbose=0`` drops them unless a stream is given. A limited number of lines per rank and call is shown;
    ``verbose=2`` and streams get all of them.
    """
    shown_here = stdout is None and stderr is None
    if verbose == 0 and shown_here:
        return drop_line
    max_lines = MAX_SHOWN_LINES if verbose < 2 and shown_here else None
    return LinePrinter(stdout, stderr, with_timestamp=with_timestamp, max_lines=max_lines)


def drop_line(rank: int, stream: str, line: str) -> None:
    """An :data:`OnLine` that writes nothing."""


class RankFiles:
    """Writes each worker's output to files below a folder.

    They are ``rank.<rank>/stdout`` and ``rank.<rank>/stderr``.

    Args:
        folder: the directory; created if it does not exist.
        size: number of ranks; files of further ranks of an elastic job are created when they first write.
    """

    def __init__(self, folder: str | Path, size: int) -> None:
        self._files: dict[tuple[int, str], IO[str]] = {}
        self._folder = Path(folder)
        self._digits = len(str(size - 1))
        self._lock = threading.Lock()
        self._has_warned = False
        for rank in range(size):
            for stream in ("stdout", "stderr"):
                self._open(rank, stream)

    def _open(self, rank: int, stream: str) -> IO[str]:
        path = self.path(rank, stream)
        path.parent.mkdir(parents=True, exist_ok=True)
        file = self._files[rank, stream] = path.open("w", encoding="utf-8", buffering=1)
        return file

    def path(self, rank: int, stream: str) -> Path:
        """The file for that output."""
        return self._folder / f"rank.{rank:0{self._digits}d}" / stream

    def __call__(self, rank: int, stream: str, line: str) -> None:
        """Write one line.

        If that fails, for example on a full disk, the job continues, and later lines may succeed.
        """
        with self._lock, self._warning():  # a rank of an elastic job may briefly have two workers
            file = self._files.get((rank, stream)) or self._open(rank, stream)
            file.write(line + "\n")

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            with self._warning():
                file.close()

    @contextlib.contextmanager
    def _warning(self) -> Iterator[None]:
        """Warn once instead of raising OSError."""
        try:
            yield
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                logger.warning("lines of the workers' output are missing under %s: %s", self._folder, error)


#: Seconds that a rank gets to exit after a traceback; then the traceback is shown like other output.
HOLD_S = 5.0
#: The first line of a traceback; a syntax error in a script has no headline.
_HEADLINE = re.compile(r'\s*(\+ Exception Group )?Traceback \(most recent call last\):$|  File ".*", line \d+$')

#: The line before a traceback that belongs to the one before it: of a chain, or quoted from another process.
_CONTINUATION = re.compile(r'(During handling of|The above exception was) .*:$|"""$')


class Tracebacks:
    """Passes lines on, but holds each rank's last traceback. Thread-safe.

    It is the last one written to stderr. When it is known whether it ends the rank, a mistake that all ranks made is
    shown once. The rank has survived every traceback before the last one, so those are passed on, and what follows
    them.
    """

    def __init__(self, on_line: OnLine, hold_s: float = HOLD_S) -> None:
        self._on_line = on_line
        self._hold_s = hold_s
        self._held: dict[int, list[str]] = {}
        self._timers: dict[int, threading.Timer] = {}
        self._lock = threading.RLock()

    def __call__(self, rank: int, stream: str, line: str) -> None:
        """Handle one line of a rank."""
        with self._lock:
            starts = stream == "stderr" and _HEADLINE.match(line) is not None
            if starts and "Traceback" in line and not self._continues(rank):
                self.release(rank)
            if stream == "stderr" and rank in self._held:
                self._held[rank].append(line)
            elif starts:
                self._held[rank] = [line]
                timer = self._timers[rank] = threading.Timer(self._hold_s, self.release, (rank,))
                timer.daemon = True
                timer.start()
            else:
                self._on_line(rank, stream, line)

    def _continues(self, rank: int) -> bool:
        """Whether a traceback that ``rank`` writes now is a part of the one that is held."""
        last = next((line for line in reversed(self._held.get(rank, [])) if line), "")
        return _CONTINUATION.match(last) is not None

    def release(self, rank: int) -> None:
        """Pass on the held lines of ``rank``."""
        with self._lock:  # also while they are written: the rank's next lines must follow them
            for line in self._take(rank):
                self._on_line(rank, "stderr", line)

    def close(self) -> None:
        """Pass on all held lines."""
        with self._lock:
            for rank in sorted(self._held):
                self.release(rank)

    def take(self, ranks: Collection[int]) -> list[tuple[list[int], str]]:
        """Remove the held lines of some ranks.

        Returns each text once, with the ranks that wrote it in order.
        """
        groups: dict[str, list[int]] = {}
        for rank in ranks:
            if lines := self._take(rank):
                groups.setdefault("\n".join(lines), []).append(rank)
        return [(sorted(group), text) for text, group in groups.items()]

    def _take(self, rank: int) -> list[str]:
        with self._lock:
            if (timer := self._timers.pop(rank, None)) is not None:
                timer.cancel()
            return self._held.pop(rank, [])


@contextlib.contextmanager
def also_written(on_line: OnLine, folder: str | None, size: int) -> Iterator[OnLine]:
    """``on_line`` that also writes to :class:`RankFiles`.

    Without a folder, ``on_line`` itself.

    Raises:
        OSError: the files cannot be created.
    """
    if folder is None:
        yield on_line
        return
    with contextlib.closing(RankFiles(folder, size)) as files:

        def both(rank: int, stream: str, line: str) -> None:
            on_line(rank, stream, line)
            files(rank, stream, line)

        yield both
