"""What was read once, kept on the local disk as Arrow files.

The files are mapped into memory.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from hvd_cluster.data.cache import DiskCache


class LocalDiskCache(DiskCache):
    """Keeps tables in a folder, until they have filled it.

    Several threads and processes may share the folder.

    Args:
        path: the folder.
        size_limit_bytes: size of all files in it; what does not fit is read again each time.
        cleanup: whether :meth:`cleanup` removes what this cache has written.
    """

    def __init__(self, path: str | Path, size_limit_bytes: int, cleanup: bool = True) -> None:
        super().__init__(path, size_limit_bytes)
        self._remove = cleanup
        self._written: set[Path] = set()

    def cleanup(self) -> None:
        """Remove what this cache has written, and the folder if nothing else is in it."""
        if not self._remove:
            return
        while self._written:
            self._written.pop().unlink(missing_ok=True)
        with suppress(OSError):  # never made, or another reader's files are there
            self._remove_if_empty()

    def _write(self, path: Path, table: Any) -> bool:
        is_new = not path.exists()
        is_there = super()._write(path, table)
        if is_new and is_there:
            self._written.add(path)
        return is_there
