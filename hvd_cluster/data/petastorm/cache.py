"""What was read once, kept on the local disk as Arrow files that are mapped into memory."""

from __future__ import annotations

import hashlib
import logging
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from hvd_cluster.data.optional import load_pyarrow

logger = logging.getLogger(__name__)


class TableCache(Protocol):
    """Keeps Arrow tables."""

    def get(self, key: str, fill: Callable[[], Any]) -> Any:
        """The table of a key; ``fill`` reads it where it is not kept."""

    def cleanup(self) -> None:
        """Forget what is kept."""


class NullCache:
    """Keeps nothing."""

    def get(self, key: str, fill: Callable[[], Any]) -> Any:
        return fill()

    def cleanup(self) -> None:
        pass


class LocalDiskCache:
    """Keeps tables in a folder, until they have filled it. Several threads and processes may share the folder.

    Args:
        path: the folder; it is made.
        size_limit_bytes: what this cache writes at most; what does not fit is read again each time.
        cleanup: whether :meth:`cleanup` removes what this cache has written.
    """

    def __init__(self, path: str | Path, size_limit_bytes: int, cleanup: bool = True) -> None:
        self._folder = Path(path)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._limit = size_limit_bytes
        self._remove = cleanup
        self._lock = threading.Lock()
        self._used = 0
        self._written: list[Path] = []

    def get(self, key: str, fill: Callable[[], Any]) -> Any:
        file = self._folder / f"{hashlib.sha256(key.encode()).hexdigest()}.arrow"
        if not file.exists():
            table = fill()
            if not self._keep(file, table):
                return table
        pyarrow, ipc = load_pyarrow(), load_pyarrow("pyarrow.ipc")
        try:
            return ipc.open_file(pyarrow.memory_map(str(file))).read_all()
        except (OSError, ValueError):  # removed or cut short by somebody else
            logger.warning("%s cannot be read, and is read from its source again", file)
            return fill()

    def cleanup(self) -> None:
        """Remove what this cache has written, and the folder if nothing else is in it."""
        if not self._remove:
            return
        with self._lock:
            for file in self._written:
                file.unlink(missing_ok=True)
            self._written.clear()
            self._used = 0
        with suppress(OSError):  # another reader's files are there
            self._folder.rmdir()

    def _keep(self, file: Path, table: Any) -> bool:
        size = table.nbytes
        with self._lock:
            if self._used + size > self._limit:
                return False
            self._used += size
        pyarrow, ipc = load_pyarrow(), load_pyarrow("pyarrow.ipc")
        temporary = file.with_name(f".{file.name}.{uuid.uuid4().hex}.tmp")
        try:
            with pyarrow.OSFile(str(temporary), "wb") as sink, ipc.new_file(sink, table.schema) as writer:
                writer.write_table(table)
            temporary.replace(file)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            logger.warning("the cache in %s takes no more: %s", self._folder, error)
            return False
        with self._lock:
            self._written.append(file)
        return True
