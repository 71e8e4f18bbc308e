"""Keeps row groups as they were read, for later epochs and other workers.

The workers are those of this host. What does not fit is read each time. The cache evicts nothing to make room for it:
an epoch reads everything once, so a cache that evicted its oldest entries would hold nothing useful when the next epoch
begins.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvd_cluster.data.files.retry import file_info
from hvd_cluster.data.filters import RowFilter
from hvd_cluster.data.optional import load_pyarrow

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger(__name__)

#: Files that are being written, under a lock that one process holds, begin so.
_UNFINISHED = ".unfinished-"
#: What a process that writes holds locked.
_LOCK = ".lock"
#: More than Arrow's format adds to a table, and to each column of it.
_HEADER_BYTES = 1024

#: A file as it was when the reader was made, and what the table makes of it; index of the row group, names of the
#: columns and of those that are read as dictionaries, and which rows.
Key = tuple[str, int, tuple[str, ...], tuple[str, ...], RowFilter | None]


def source_of(filesystem: Any, path: str) -> str:
    """A file as it is now, for a :data:`Key`: one that changes is another source.

    Args:
        filesystem: the ``pyarrow.fs.FileSystem`` with the file.
        path: the path inside it.

    Raises:
        OSError: what the filesystem says, after :func:`~hvd_cluster.data.files.retry.retried`.
    """
    info = file_info(filesystem, path)
    return f"{filesystem.type_name} {info.size} {info.mtime_ns} {path}"


class RowGroupCache(ABC):
    """Tables by row group. Several threads may use it at once."""

    @abstractmethod
    def get(self, key: Key, read: Callable[[], pa.Table]) -> pa.Table:
        """The table of a row group: the one that is kept, or what ``read()`` returns.

        Args:
            key: which table is meant.
            read: reads it.

        Returns:
            A table that others may share: do not write to its memory.
        """


class MemoryCache(RowGroupCache):
    """Keeps tables in this process's memory.

    Args:
        limit_bytes: Arrow buffers kept in all.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._tables: dict[Key, Any] = {}
        #: Bytes that are kept now.
        self.held_bytes = 0

    def get(self, key: Key, read: Callable[[], pa.Table]) -> pa.Table:
        table = self._tables.get(key)
        if table is not None:
            return table
        table = read()
        with self._lock:
            if key not in self._tables and self.held_bytes + table.nbytes <= self._limit_bytes:
                self._tables[key] = table
                self.held_bytes += table.nbytes
        return table

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process begins with an empty one."""
        return MemoryCache, (self._limit_bytes,)

    def clear(self) -> None:
        """Empty the cache."""
        with self._lock:
            self._tables.clear()
            self.held_bytes = 0


class DiskCache(RowGroupCache):
    """Keeps tables as Arrow files on the local disk.

    All processes of the host map them into memory. A file is named by what it was read from (path, size and time of
    change of the source, row group, columns, filter), so a new reader reads a changed source again. When the folder is
    full, files that no process has asked for longest make room, but none that was asked for in the last hour.

    Args:
        folder: a local folder for nothing else; it is made, and stays when the job ends, for the next one.
        limit_bytes: size of all files in it.
    """

    #: A file that was asked for within this time may belong to a job that is running.
    IN_USE_S = 3600.0

    def __init__(self, folder: str | os.PathLike[str], limit_bytes: int) -> None:
        self._folder = Path(folder).absolute()
        self._limit_bytes = limit_bytes
        self._has_warned = False  # once is enough: it would be said of every row group

    def get(self, key: Key, read: Callable[[], pa.Table]) -> pa.Table:
        path = self._folder / f"{hashlib.blake2b(repr(key).encode(), digest_size=16).hexdigest()}.arrow"
        table = _mapped(path)
        if table is not None:
            return table
        table = read()
        return (_mapped(path) if self._write(path, table) else None) or table

    def _write(self, path: Path, table: pa.Table) -> bool:
        """Write a table where there is room; whether it is there now."""
        pyarrow, ipc = load_pyarrow(), load_pyarrow("pyarrow.ipc")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with self._locked():
                for abandoned in self._folder.glob(f"{_UNFINISHED}*"):  # of a process that was killed
                    abandoned.unlink()
                if path.exists() or not self._make_room(table.nbytes + _HEADER_BYTES * (1 + table.num_columns)):
                    return path.exists()
                unfinished = self._folder / f"{_UNFINISHED}{path.name}"
                try:
                    with pyarrow.OSFile(str(unfinished), "wb") as sink, ipc.new_file(sink, table.schema) as writer:
                        writer.write_table(table.combine_chunks())
                    unfinished.replace(path)
                finally:
                    unfinished.unlink(missing_ok=True)  # half a file would fill the disk further
        except OSError as error:  # a full disk: the job continues without the cache
            is_first, self._has_warned = not self._has_warned, True
            if is_first:
                logger.warning(
                    "the cache in %s could not keep a row group: %s. The data is read from its source instead, which "
                    "takes longer; choose another folder or a smaller limit_bytes (now %d)",
                    self._folder,
                    error,
                    self._limit_bytes,
                )
            return False
        return True

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Only one process of the host writes at a time, so that the limit holds."""
        descriptor = os.open(self._folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _remove_if_empty(self) -> None:
        """Remove the folder if no table is in it.

        Raises:
            OSError: there is something in it, or no such folder.
        """
        with self._locked():
            if any(file.name != _LOCK for file in self._folder.iterdir()):
                return
            (self._folder / _LOCK).unlink()
        self._folder.rmdir()

    def _make_room(self, num_bytes: int) -> bool:
        """Delete unused files until this many bytes fit; False if they do not."""
        files = []
        for file in self._folder.glob("*.arrow"):
            with contextlib.suppress(FileNotFoundError):  # a damaged one, which its finder removes at once
                files.append((file, file.stat()))
        held_bytes = sum(status.st_size for _, status in files)
        unused = [(s.st_mtime, s.st_size, file) for file, s in files if s.st_mtime < time.time() - self.IN_USE_S]
        for _, size, file in sorted(unused):
            if held_bytes + num_bytes <= self._limit_bytes:
                break
            file.unlink(missing_ok=True)  # processes that have it mapped keep its memory
            held_bytes -= size
        return held_bytes + num_bytes <= self._limit_bytes


def _mapped(path: Path) -> Any:
    """The table in a file, mapped into memory; None where there is no whole file."""
    pyarrow, ipc = load_pyarrow(), load_pyarrow("pyarrow.ipc")
    try:
        table = ipc.open_file(pyarrow.memory_map(str(path))).read_all()
        os.utime(path)  # the time of its last use
    except OSError:  # not there yet; if it cannot be written either, that is what will be said
        return None
    except pyarrow.ArrowInvalid:  # the machine went down while its disk still held back some of it
        path.unlink(missing_ok=True)
        return None
    return table
