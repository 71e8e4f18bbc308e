"""The timeline on disk: limited in size, a complete JSON array even after a kill."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from hvd_cluster.engine.timeline.recorder import Record

#: Linux checks for fatal signals between two pages of a write, never within one. Larger pages consist of these.
_PAGE_BYTES = 4096
_SMALLEST_BYTES = 64 << 10
_COPY_BYTES = 1 << 20
#: Room in a page for the beginning of the file, a comma and its end.
_SPARE_BYTES = 16

_BEGIN: Final = b"[\n"
_END: Final = b"\n]\n"


class TimelineFile:
    """A bounded JSON array of events.

    Appending to an array means moving its closing bracket, and a ``kill -9`` may interrupt that. So the bracket is at
    the end of the file from the start, with white space between it and the events, and each write replaces white space
    inside one page, which no signal interrupts. When the file is full, a copy of twice the size replaces it. When half
    of ``max_bytes`` is full, the file is renamed to ``<name>.older.json``, which replaces the previous one, and a new
    file begins.

    Args:
        path: the file; an existing one is replaced.
        max_bytes: the largest size of the file and the older one together; at least 256 KiB.

    Raises:
        OSError: the file cannot be written, or ``path`` is not a file.
    """

    def __init__(self, path: str | os.PathLike[str], max_bytes: int = 256 << 20) -> None:
        self._path = Path(path)
        self._older = self._path.with_name(f"{self._path.stem}.older{self._path.suffix}")
        self._next = self._path.with_name(f"{self._path.name}.part")
        self._max_bytes = max(2 * _SMALLEST_BYTES, max_bytes // 2 // _PAGE_BYTES * _PAGE_BYTES)
        if self._path.exists() and not self._path.is_file():
            raise OSError(errno.EINVAL, "a timeline needs a regular file", str(self._path))
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._older.unlink(missing_ok=True)
        #: The lines that name each track, kept for the next file.
        self._names: dict[tuple[int, int], list[bytes]] = {}
        #: How many of them are in this file.
        self._num_named: dict[tuple[int, int], int] = {}
        self._descriptor = -1
        self._capacity = 0
        #: Where the next line goes.
        self._end = 0
        self._has_events = False
        self._begin()

    def is_at(self, path: str | os.PathLike[str]) -> bool:
        """Whether ``path`` is the path of this file or of the older one."""
        return Path(path).absolute() in (self._path.absolute(), self._older.absolute())

    def write(self, records: Iterable[Record]) -> None:
        """Append the lines of ``records``; a new file first repeats the tracks' names.

        Raises:
            OSError: the disk is full; the file is still complete.
        """
        page: list[bytes] = []
        for rank, track, names_track, line in records:
            if names_track:
                self._names.setdefault((rank, track), []).append(line)
                continue
            page = self._introduce(rank, track, page)
            page = self._put(line, page)
            # The line may have been the first of a new file; names may follow what they name.
            page = self._introduce(rank, track, page)
        self._write_page(page)

    def close(self) -> None:
        """Close the file and remove its white space; may be called twice."""
        if self._descriptor < 0:
            return
        with suppress(OSError):  # the file is complete, only larger than necessary
            self._replace(self._end + len(_END))
        os.close(self._descriptor)
        self._descriptor = -1

    def _introduce(self, rank: int, track: int, page: list[bytes]) -> list[bytes]:
        """Add the names of a track and its rank if the file lacks them; returns the page."""
        for key in ((rank, 0), (rank, track)):  # the rank itself is named in its track 0
            names = self._names.get(key, [])
            while (num_named := self._num_named.get(key, 0)) < len(names):
                self._num_named[key] = num_named + 1  # first: a new file, begun by _put(), resets it
                page = self._put(names[num_named], page)
        return page

    def _put(self, line: bytes, page: list[bytes]) -> list[bytes]:
        """Add a line to the page, or write that and begin the next; returns the page."""
        if len(line) > _PAGE_BYTES - _SPARE_BYTES:
            return page  # recorders shorten what is that long
        line = (b",\n" if self._has_events else b"") + line
        filled = self._end + sum(map(len, page))
        limit = min((self._end // _PAGE_BYTES + 1) * _PAGE_BYTES, self._capacity - len(_END))
        if filled + len(line) > limit:
            self._write_page(page)
            page = []
            self._end = min((self._end + _PAGE_BYTES - 1) // _PAGE_BYTES * _PAGE_BYTES, self._capacity)
            if self._end + len(line) > self._capacity - len(_END):
                if 2 * self._capacity <= self._max_bytes:
                    self._replace(2 * self._capacity)
                else:
                    self._rotate()
                    line = line.removeprefix(b",\n")
        self._has_events = True
        page.append(line)
        return page

    def _write_page(self, page: list[bytes]) -> None:
        if page:
            block = b"".join(page)
            os.pwrite(self._descriptor, block, self._end)
            self._end += len(block)

    def _begin(self) -> None:
        """Replace the file by an empty one of the smallest size."""
        descriptor = os.open(self._next, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            _fill(descriptor, _BEGIN, _SMALLEST_BYTES)
            self._next.replace(self._path)
        except BaseException:  # raised again: half a file must not remain on a full disk
            os.close(descriptor)
            self._next.unlink(missing_ok=True)
            raise
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = descriptor
        self._capacity = _SMALLEST_BYTES
        self._end = len(_BEGIN)
        self._has_events = False
        self._num_named = {}

    def _replace(self, capacity: int) -> None:
        """Replace the file by a copy of ``capacity`` bytes."""
        descriptor = os.open(self._next, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            copied, filled = 0, min(self._end, self._capacity - len(_END))
            while copied < filled:
                block = os.pread(self._descriptor, min(_COPY_BYTES, filled - copied), copied)
                copied += _write_all(descriptor, block)
            _fill(descriptor, b"", capacity - copied)
            self._next.replace(self._path)
        except BaseException:  # raised again: half a copy must not remain on a full disk
            os.close(descriptor)
            self._next.unlink(missing_ok=True)
            raise
        os.close(self._descriptor)
        self._descriptor = descriptor
        self._capacity = capacity

    def _rotate(self) -> None:
        """Rename the file to the older one and begin another; one always exists."""
        self._older.unlink(missing_ok=True)
        try:
            os.link(self._path, self._older)
        except OSError:  # a file system without hard links, such as a mounted object store
            self._path.replace(self._older)
        self._begin()


def _fill(descriptor: int, head: bytes, num_bytes: int) -> None:
    """Write ``head``, white space and the end: ``num_bytes`` in all."""
    left = num_bytes - len(head) - len(_END)
    _write_all(descriptor, head)
    blank = b" " * min(left, _COPY_BYTES)
    while left > 0:
        left -= _write_all(descriptor, blank[:left])
    _write_all(descriptor, _END)


def _write_all(descriptor: int, data: bytes) -> int:
    written = 0
    while written < len(data):
        written += os.write(descriptor, data[written:])
    return written
