"""Folders of a data set: marked while they are filled, complete or gone afterwards."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from hvd_cluster.data.reader import ParquetReader
from hvd_cluster.data.schema import infer
from hvd_cluster.data.store import Store
from hvd_cluster.data.writing.folders import DatasetFolders, FoldersTakenError
from hvd_cluster.data.writing.part_writer import PartPlan, write_part
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


def half_held_out(store: Store) -> tuple[PartPlan, pa.RecordBatch]:
    """A plan whose folders the driver makes, and rows for it."""
    batch = pa.RecordBatch.from_pydict({"id": list(range(100))})
    train, held = (store.get_localized_path(f"{store.prefix}/{name}") for name in ("train", "held"))
    plan = PartPlan(
        store=store,
        schema=infer(batch.schema),
        train_folder=train,
        validation_folder=held,
        validation=0.5,
        makes_folders=False,
    )
    return plan, batch


@pytest.mark.parametrize("prefix", ["", "memory://late-attempts/store"])
@pytest.mark.parametrize("aborted", [False, True])
def test_an_attempt_that_ends_after_the_driver_has_all_parts_leaves_no_file(
    tmp_path: Path, prefix: str, aborted: bool
) -> None:
    """A speculative task that Spark does not stop in time."""
    store = Store.create(prefix or tmp_path / "store")
    plan, batch = half_held_out(store)
    folders = list(plan.folders)

    def late(filled: DatasetFolders, plan: PartPlan) -> Iterator[pa.RecordBatch]:
        if aborted:
            filled.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
        else:
            done = write_part(plan, 0, [batch])
            filled.complete({group.path for group in (*done.train, *done.validation)})
            kept.extend(store.list(store.prefix, recursive=True))
        yield batch  # its files show up only now, as those of any attempt do on an object store

    kept: list[str] = []
    try:
        with DatasetFolders(store, folders) as filled:
            plan = replace(plan, claim=filled.claim)
            with pytest.raises((DataError, FileNotFoundError)):  # the folder itself has gone from a local disk
                write_part(plan, 0, late(filled, plan))
        assert len([path for path in kept if path.endswith(".parquet")]) == (0 if aborted else 2)
        assert store.list(store.prefix, recursive=True) == kept
    finally:
        store.delete(store.prefix)


def test_a_file_that_appears_while_folders_are_removed_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder is empty already, and the first one still holds the claim."""
    store = Store.create("memory://removed-folders/store")
    plan, batch = half_held_out(store)
    folders = list(plan.folders)
    delete = store.delete
    errors: list[str] = []

    def delete_and_write(path: str) -> None:
        delete(path)
        if path == f"{folders[1]}/{filled.claim}":
            with pytest.raises(DataError) as caught:
                write_part(replace(plan, claim=filled.claim), 0, [batch])
            errors.append(str(caught.value))

    filled = DatasetFolders(store, folders)
    try:
        filled.__enter__()
        monkeypatch.setattr(store, "delete", delete_and_write)
        filled.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
        assert store.list(store.prefix, recursive=True) == []
        assert "either the driver has given the rows up, or the store" in errors[0]
        assert "must be a path or URL that all machines share" in errors[0]
    finally:
        delete(store.prefix)


def test_a_file_that_appears_while_the_folder_is_completed_goes(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = f"{store.prefix}/train"
    write = store.write

    def write_and_more(path: str, data: bytes) -> None:
        if path.endswith("/_SUCCESS"):
            write(f"{folder}/late.parquet", b"")
        write(path, data)

    with DatasetFolders(store, [folder]) as folders:
        write(f"{folder}/a.parquet", b"")
        monkeypatch.setattr(store, "write", write_and_more)
        folders.complete({f"{folder}/a.parquet"})
    assert names(store) == ["train", "train/_SUCCESS", "train/a.parquet"]


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
