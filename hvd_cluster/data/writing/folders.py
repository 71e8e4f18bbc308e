"""The folders of a data set during its writing.

One writer owns them, and no reader takes them for complete.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from hvd_cluster.data.reading.parquet_files import INCOMPLETE, SUCCESS
from hvd_cluster.data.store import Store
from hvd_cluster.errors import DataError

logger = logging.getLogger(__name__)

#: Seconds that the first of several claims waits for the others to be withdrawn (a listing and a deletion each).
_WAIT_S = 2.0
_POLL_S = 0.02
#: Seconds that files may still appear in folders that are being removed.
_LAST_FILES_S = 5.0


class FoldersTakenError(DataError):
    """The folders hold data already, or another process writes to them now."""


class DatasetFolders:
    """A context in which folders are filled; an exception removes what they hold.

    No filesystem but a local one makes a file only if it is new, so a writer claims the first folder with a file of its
    own name and then looks whether the folder holds anything else. Of two writers at least one sees the other's claim
    (as long as a listing shows what was written before it), and none continues with a claim beside its own: all
    withdraw but the one whose claim is the first by name, and that one waits, but not
    for a writer that has continued already.

    Args:
        store: serves the folders.
        folders: new ones, inside the store's filesystem.

    Raises:
        FoldersTakenError: (on entering) a folder holds data already, or another process writes to it.
        DataError: (on entering) the store cannot be written.
    """

    def __init__(self, store: Store, folders: Sequence[str]) -> None:
        self._store = store
        self._folders = folders
        self._claim = f"{INCOMPLETE}.{uuid.uuid4().hex}"

    def __enter__(self) -> DatasetFolders:
        self._store.check_writable()
        first, *others = self._folders
        self._require_empty(self._folders)
        try:
            self._store.write(f"{first}/{self._claim}", b"")
            self._wait_alone(first)
            self._require_empty(others)  # the writer that fills them has claimed the first one too
            for folder in others:
                self._store.write(f"{folder}/{self._claim}", b"")
        except BaseException:  # raised again: a claim that stays would block all writers
            for folder in self._folders:
                self._store.delete(f"{folder}/{self._claim}")
            raise
        return self

    def complete(self, paths: set[str]) -> None:
        """Say that exactly these files are the data.

        A repeated or speculative attempt at a part may still run. An attempt that finds SUCCESS, or a folder without
        the claim, after it has named its files removes them, and the files of any other are in the listing that
        follows SUCCESS.
        """
        unseen = sorted(paths - self._listed())
        if unseen:
            raise DataError(
                f"the executors wrote {unseen[0]}, but the driver does not see it: the store {self._store.prefix!r} "
                "must be a path or URL that all machines share"
            )
        for folder in self._folders:
            self._store.write(f"{folder}/{SUCCESS}", b"")
        for path in self._listed() - paths:
            if path.endswith(".parquet"):
                self._store.delete(path)
        for folder in self._folders:
            self._store.delete(f"{folder}/{self._claim}")

    @property
    def claim(self) -> str:
        """The file in each folder that is there until the data is complete.

        Then it is replaced by SUCCESS, or the data is given up.
        """
        return self._claim

    def _listed(self) -> set[str]:
        return {path for folder in self._folders for path in self._store.list(folder)}

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        if error is None:
            return
        for folder in reversed(self._folders):
            try:
                self._remove(folder)
            except OSError:
                logger.warning("could not remove the incomplete data in %s", folder, exc_info=True)

    def _require_empty(self, folders: Sequence[str]) -> None:
        for folder in folders:
            if self._names(folder):
                raise FoldersTakenError(f"{folder!r} holds data already: choose another dataset_id, or delete it")

    def _wait_alone(self, folder: str) -> None:
        """Return when this claim is all that the folder holds."""
        until = time.monotonic() + _WAIT_S
        while (names := self._names(folder)) != [self._claim]:
            waits = names[:1] == [self._claim] and all(name.startswith(INCOMPLETE) for name in names)
            if not waits or time.monotonic() > until:
                raise FoldersTakenError(
                    f"{folder!r} is being written by another process now: choose another dataset_id"
                )
            time.sleep(_POLL_S)

    def _names(self, folder: str) -> list[str]:
        """What the folder holds, sorted, without claims that are still temporary."""
        names = [path.rsplit("/", 1)[-1] for path in self._store.list(folder)]
        return [name for name in names if not (INCOMPLETE in name and name.endswith(".tmp"))]

    def _remove(self, folder: str) -> None:
        """Delete what was written, the claim last.

        Until it is deleted no other writer begins. Tasks that were cancelled may continue for a moment; once the claim
        has gone from a folder they remove their files.
        """
        until = time.monotonic() + _LAST_FILES_S
        while True:
            for name in self._names(folder):
                if not name.startswith(INCOMPLETE):
                    self._store.delete(f"{folder}/{name}")
            self._store.delete(f"{folder}/{self._claim}")
            left = self._store.list(folder)
            if not left:
                with suppress(FileNotFoundError):
                    self._store.delete(folder)
            if not left or any(INCOMPLETE in path for path in left) or time.monotonic() > until:
                return
