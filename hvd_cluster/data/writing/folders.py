"""The folders of a data set while it is being written: never taken for whole before they are."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from hvd_cluster.data.reading.parquet import INCOMPLETE, SUCCESS
from hvd_cluster.data.store import Store
from hvd_cluster.errors import DataError

logger = logging.getLogger(__name__)


class DatasetFolders:
    """A context in which folders are filled; an exception removes them.

    Args:
        store: serves the folders.
        folders: new ones, inside the store's filesystem.

    Raises:
        DataError: (on entering) the store cannot be written, or a folder holds data already.
    """

    def __init__(self, store: Store, folders: Sequence[str]) -> None:
        self._store = store
        self._folders = folders

    def __enter__(self) -> DatasetFolders:
        self._store.check_writable()
        for folder in self._folders:
            if self._store.list(folder):
                raise DataError(f"{folder!r} holds data already: choose another dataset_id, or delete it")
        for folder in self._folders:
            self._store.write(f"{folder}/{INCOMPLETE}", b"")
        return self

    def complete(self, paths: set[str]) -> None:
        """Say that exactly these files are the data.

        Raises:
            DataError: this process does not see what the executors wrote.
        """
        there = {path for folder in self._folders for path in self._store.list(folder)}
        unseen = sorted(paths - there)
        if unseen:
            raise DataError(
                f"the executors wrote {unseen[0]}, but the driver does not see it: the store {self._store.prefix!r} "
                "must be a path or URL that all machines share"
            )
        for path in there - paths:
            if path.endswith(".parquet"):  # of a task attempt that was repeated
                self._store.delete(path)
        for folder in self._folders:
            self._store.write(f"{folder}/{SUCCESS}", b"")
            self._store.delete(f"{folder}/{INCOMPLETE}")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        if error is None:
            return
        for folder in self._folders:
            try:
                self._store.delete(folder)
            except OSError:
                logger.warning("could not remove the incomplete data in %s", folder, exc_info=True)
