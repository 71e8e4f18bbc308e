"""Folders of a data set: marked while they are filled, complete or gone afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvd_cluster.data.store import Store
from hvd_cluster.data.writing.folders import DatasetFolders
from hvd_cluster.errors import DataError


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "store")


def names(store: Store) -> list[str]:
    return [path[len(store.prefix) + 1 :] for path in store.list(store.prefix, recursive=True)]


def test_a_folder_is_marked_until_it_is_complete(store: Store) -> None:
    folder = f"{store.prefix}/train"
    with DatasetFolders(store, [folder]) as folders:
        assert names(store) == ["train", "train/_INCOMPLETE"]
        store.write(f"{folder}/a.parquet", b"")
        store.write(f"{folder}/of-a-repeated-task.parquet", b"")
        folders.complete({f"{folder}/a.parquet"})
    assert names(store) == ["train", "train/_SUCCESS", "train/a.parquet"]


def test_an_exception_removes_what_was_written(store: Store) -> None:
    def interrupted() -> None:
        with DatasetFolders(store, [f"{store.prefix}/train"]):
            store.write(f"{store.prefix}/train/a.parquet", b"")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert names(store) == []


def test_files_that_the_driver_does_not_see_mean_that_the_store_is_not_shared(store: Store) -> None:
    folder = f"{store.prefix}/train"
    message = "does not see it: the store .* must be a path or URL that all machines share"
    with pytest.raises(DataError, match=message), DatasetFolders(store, [folder]) as folders:
        folders.complete({f"{folder}/on-another-machine.parquet"})
    assert names(store) == []
