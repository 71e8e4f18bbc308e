"""Deletes the data sets of earlier fits from a store, by age or by name."""

from __future__ import annotations

import datetime as dt
import logging

from hvd_cluster.data.files.retry import file_info
from hvd_cluster.data.store import Store

logger = logging.getLogger(__name__)

#: A file of this name is written again whenever a data set is used again.
USED = "_USED"


def mark_used(store: Store, folder: str) -> None:
    """Renew the age of a folder."""
    store.write(f"{folder}/{USED}", b"")


def remove_older_than(store: Store, age_s: float) -> list[str]:
    """Delete a store's intermediate data sets that were unused for some time.

    Writing one is a use. A data set that a fit reads right now is as old as its last use: choose an age longer than any
    fit, or make sure that none is running.

    Args:
        store: its folders ``intermediate_train_data.*`` and so on are checked.
        age_s: seconds since the newest file of a folder was written; 0 deletes all.

    Returns:
        The folders that were deleted, as paths inside the filesystem, sorted.
    """
    now = dt.datetime.now(dt.timezone.utc)
    removed: list[str] = []
    for folders in _folders_by_id(store).values():
        changes = [change for folder in folders if (change := _last_change(store, folder)) is not None]
        # Where a filesystem has no times, only a clean sweep removes anything.
        if age_s <= 0 or (changes and (now - max(changes)).total_seconds() >= age_s):
            for folder in folders:
                store.delete(folder)
                logger.info("removed the data set in %s", folder)
            removed += folders
    return sorted(removed)


def remove(store: Store, dataset_id: str | int) -> list[str]:
    """Delete the folders of one data set.

    Returns:
        Those that were there.
    """
    removed = sorted(_folders_by_id(store).get(str(dataset_id), []))
    for folder in removed:
        store.delete(folder)
    return removed


def _folders_by_id(store: Store) -> dict[str, list[str]]:
    """Dataset id -> its folders, inside the filesystem.

    They are for training, validation and test.
    """
    found: dict[str, list[str]] = {}
    for path in (store.get_train_data_path(), store.get_val_data_path(), store.get_test_data_path()):
        parent, name = path.rsplit("/", 1)
        for folder in store.list(parent):
            own = folder.rsplit("/", 1)[-1]
            if own.startswith(f"{name}."):  # the name may hold dots itself
                found.setdefault(own[len(name) + 1 :], []).append(folder)
    return found


def _last_change(store: Store, folder: str) -> dt.datetime | None:
    """When the newest file of a folder was written; None where there is none."""
    paths = store.list(folder, recursive=True)
    infos = file_info(store.fs, paths)
    return max((info.mtime for info in infos if info.mtime is not None), default=None)
