"""Folders of a data set: marked while they are filled, complete or gone afterwards."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hvd_cluster.data.reader import ParquetReader
from hvd_cluster.data.store import Store
from hvd_cluster.data.writing.folders import DatasetFolders, FoldersTakenError
from hvd_cluster.errors import DataError


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "store")


def names(store: Store) -> list[str]:
    return [path[len(store.prefix) + 1 :] for path in store.list(store.prefix, recursive=True)]


def test_a_folder_is_marked_until_it_is_complete(store: Store) -> None:
    folder = f"{store.prefix}/train"
    with DatasetFolders(store, [folder]) as folders:
        (mark,) = names(store)[1:]
        assert mark.startswith("train/_INCOMPLETE.")
        with pytest.raises(DataError, match="there is no Parquet|is still being written"):
            ParquetReader(folder, batch_size=1)
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


def test_what_a_task_still_writes_while_the_folder_is_removed_goes_too(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, late = f"{store.prefix}/train", ["b.parquet", "a.parquet"]
    delete = store.delete

    def delete_and_write(path: str) -> None:
        delete(path)
        if late:
            store.write(f"{folder}/{late.pop()}", b"")

    def interrupted() -> None:
        with DatasetFolders(store, [folder]):
            monkeypatch.setattr(store, "delete", delete_and_write)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not late
    assert names(store) == []


def test_files_that_the_driver_does_not_see_mean_that_the_store_is_not_shared(store: Store) -> None:
    folder = f"{store.prefix}/train"
    message = "does not see it: the store .* must be a path or URL that all machines share"
    with pytest.raises(DataError, match=message), DatasetFolders(store, [folder]) as folders:
        folders.complete({f"{folder}/on-another-machine.parquet"})
    assert names(store) == []


@pytest.mark.long
def test_of_writers_that_begin_at_once_one_fills_the_folder_and_the_others_leave_nothing(store: Store) -> None:
    gate = threading.Barrier(4)

    def enter(folder: str) -> bool:
        gate.wait()
        try:
            with DatasetFolders(store, [folder, f"{folder}-held"]) as folders:
                time.sleep(0.01)
                store.write(f"{folder}/{threading.get_ident()}.parquet", b"")
                folders.complete({f"{folder}/{threading.get_ident()}.parquet"})
        except FoldersTakenError:
            return False
        return True

    with ThreadPoolExecutor(4) as pool:
        for number in range(20):
            folder = f"{store.prefix}/{number}"
            assert sum(pool.map(enter, [folder] * 4)) == 1
            assert len(store.list(folder)) == 2
            assert [name for name in names(store) if "INCOMPLETE" in name] == []


def test_a_writer_that_fails_takes_its_own_away_and_no_others_claim(store: Store) -> None:
    folder = f"{store.prefix}/train"

    def fails() -> None:
        with DatasetFolders(store, [folder]):
            store.write(f"{folder}/a.parquet", b"")
            store.write(f"{folder}/_INCOMPLETE.of-another", b"")
            raise ValueError("full")

    with pytest.raises(ValueError, match="full"):
        fails()
    assert names(store) == ["train", "train/_INCOMPLETE.of-another"]
    with pytest.raises(FoldersTakenError, match="choose another dataset_id"), DatasetFolders(store, [folder]):
        pass
