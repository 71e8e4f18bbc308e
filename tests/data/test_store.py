"""Stores: one spelling of a path, writes that are whole or absent, and errors that say what to do."""

from __future__ import annotations

import base64
import errno
import inspect
import os
import pickle
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hvd_cluster.data.files import filesystems
from hvd_cluster.data.files.store_families import DBFSLocalStore, HDFSStore
from hvd_cluster.data.store import FilesystemStore, LocalStore, Store
from hvd_cluster.errors import DataError


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "store")


def test_every_spelling_of_a_local_path_is_the_same_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    spellings = ["work", "work/", "./work", tmp_path / "work", f"file://{tmp_path}/work", f"file:{tmp_path}/work"]
    stores = [Store.create(spelling) for spelling in spellings]
    assert {store.prefix for store in stores} == {str(tmp_path / "work")}
    assert len(set(stores)) == 1
    assert Store.create(stores[0]) is stores[0]


def test_a_relative_store_means_the_same_folder_after_a_change_of_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    relative = Store.create("work")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    relative.write(relative.prefix + "/x", b"1")
    assert (tmp_path / "work" / "x").read_bytes() == b"1"


@pytest.mark.parametrize("wrong", ["", 7, None, "file://otherhost/path"])
def test_what_is_not_a_path_is_refused(wrong: object) -> None:
    with pytest.raises(DataError):
        Store.create(wrong)  # type: ignore[arg-type]


def test_the_layout_below_the_prefix_is_the_one_that_horovod_users_know(tmp_path: Path) -> None:
    store = Store.create(tmp_path)
    below = {
        store.get_train_data_path(): "intermediate_train_data",
        store.get_train_data_path(3): "intermediate_train_data.3",
        store.get_val_data_path("a"): "intermediate_val_data.a",
        store.get_test_data_path(): "intermediate_test_data",
        store.get_runs_path(): "runs",
        store.get_run_path("r1"): "runs/r1",
        store.get_checkpoint_path("r1"): "runs/r1/checkpoint",
        store.get_logs_path("r1"): "runs/r1/logs",
    }
    assert {path: str(tmp_path / name) for path, name in below.items()} == {path: path for path in below}
    assert store.get_full_path(store.get_runs_path()) == f"file://{tmp_path}/runs"


def test_paths_and_names_can_be_given(tmp_path: Path) -> None:
    store = FilesystemStore(tmp_path, train_path=str(tmp_path / "t"), runs_path="/r", checkpoint_filename="last.pt")
    assert store.get_train_data_path(1) == f"{tmp_path}/t.1"
    assert store.get_checkpoint_path("x") == "/r/x/last.pt"
    unsaved = LocalStore(tmp_path, save_runs=False)
    assert not unsaved.saving_runs()
    assert not unsaved.to_remote("run", None).saving_runs
    assert unsaved.get_checkpoint_path("x") is None
    assert unsaved.get_logs_path("x") is None
    assert unsaved.get_checkpoints("x") == []


@pytest.mark.parametrize("prefix", ["{tmp_path}/s", "memory://test-store/s"])
def test_files_are_written_read_listed_copied_and_deleted(tmp_path: Path, prefix: str) -> None:
    store = Store.create(prefix.format(tmp_path=tmp_path))
    path = f"{store.get_run_path('r')}/a.ckpt"
    assert not store.exists(path)
    assert store.list(store.get_run_path("r")) == []
    store.write(path, b"one")
    store.write(path, b"two")
    store.write_text(f"{store.get_run_path('r')}/b.txt", "Grüße")
    assert store.read(path) == b"two"
    assert store.is_file(path)
    assert not store.is_file(store.get_run_path("r"))
    store.copy(path, f"{store.prefix}/deep/copy")
    assert store.read(f"{store.prefix}/deep/copy") == b"two"
    assert [name.rsplit("/", 1)[1] for name in store.list(store.get_run_path("r"))] == ["a.ckpt", "b.txt"]
    assert [name.rsplit("/", 1)[1] for name in store.get_checkpoints("r")] == ["a.ckpt"]
    again = pickle.loads(pickle.dumps(store))
    assert again == store
    assert again.read(f"{store.get_run_path('r')}/b.txt").decode() == "Grüße"
    store.delete(path)
    store.delete(path)
    assert not store.exists(path)
    store.delete(store.prefix)
    assert not store.exists(store.prefix)
    with pytest.raises(FileNotFoundError):
        store.read(path)


@pytest.mark.long
def test_a_reader_sees_the_old_file_or_the_new_one_but_no_half(store: Store) -> None:
    path = f"{store.prefix}/checkpoint"
    contents = [bytes([number]) * 300_000 for number in range(8)]
    store.write(path, contents[0])
    done = threading.Event()
    seen: set[bytes] = set()

    def read() -> None:
        while not done.is_set():
            seen.add(store.read(path))

    thread = threading.Thread(target=read)
    thread.start()
    for content in contents * 3:
        store.write(path, content)
    done.set()
    thread.join()
    assert seen <= set(contents)


def test_a_write_that_fails_leaves_the_old_file_and_no_other(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    path = f"{store.prefix}/checkpoint"
    store.write(path, b"old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(filesystems.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        store.write(path, b"new")
    assert store.read(path) == b"old"
    assert [file.name for file in Path(store.prefix).iterdir()] == ["checkpoint"]


def test_a_local_folder_is_copied_into_a_run(store: Store, tmp_path: Path) -> None:
    (tmp_path / "out" / "logs").mkdir(parents=True)
    (tmp_path / "out" / "logs" / "events").write_bytes(b"e")
    pickle.loads(pickle.dumps(store.sync_fn("r")))(str(tmp_path / "out"))
    assert store.read(f"{store.get_logs_path('r')}/events") == b"e"


# --- what cannot be written -----------------------------------------------------------------------------------------


def test_a_writable_store_is_left_as_it_was(store: Store) -> None:
    store.check_writable()
    assert list(Path(store.prefix).iterdir()) == []


def test_a_store_below_a_file_is_refused_with_path_cause_and_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(
        DataError, match=r"store '.*/file/s' cannot be written: .*irectory.*choose a path below a folder"
    ):
        Store.create(tmp_path / "file" / "s").check_writable()


def test_a_store_where_no_folder_can_be_made_is_refused() -> None:
    with pytest.raises(DataError, match="'/proc/hvd' cannot be written: .*choose a path"):
        Store.create("/proc/hvd").check_writable()


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 16 kB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", disk], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"may not mount a file system here: {mounted.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_full_disk_is_told_as_such_and_the_probe_is_removed(tiny_disk: Path) -> None:
    with pytest.raises(
        DataError, match="cannot be written: No space left on device; the disk is full: free some space"
    ):
        Store.create(tiny_disk).check_writable()
    assert list(tiny_disk.iterdir()) == []


# --- families -------------------------------------------------------------------------------------------------------


def test_hdfs_urls_make_an_hdfs_store() -> None:
    store = Store.create("hdfs://namenode:8020/user/me/", save_runs=False)
    assert isinstance(store, HDFSStore)
    assert store.prefix == "hdfs://namenode:8020/user/me"
    assert store.get_run_path("r") == "hdfs://namenode:8020/user/me/runs/r"
    assert pickle.loads(pickle.dumps(store)) == store


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("hdfs://a:9000/x/y", ("a", 9000, "/x/y")),
        ("hdfs://a/x", ("a", None, "/x")),
        ("hdfs:///x", (None, None, "/x")),
        ("/x", (None, None, "/x")),
    ],
)
def test_hdfs_urls_are_split(url: str, parts: tuple[object, ...]) -> None:
    assert HDFSStore.parse_url(url) == parts


def test_another_scheme_or_host_is_a_mismatch_for_hdfs() -> None:
    with pytest.raises(ValueError, match="Mismatched HDFS namespace"):
        HDFSStore("s3://bucket/x")
    with pytest.raises(ValueError, match="Mismatched HDFS namespace"):
        HDFSStore("hdfs://a/x", host="b")


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What pyarrow's connections to HDFS were made with; there is no HDFS here."""
    made: list[dict[str, Any]] = []

    def connect(**options: Any) -> str:
        made.append(options)
        return "hdfs"

    monkeypatch.setattr("pyarrow.fs.HadoopFileSystem", connect)
    return made


def test_an_hdfs_store_takes_horovods_arguments_in_their_order(connected: list[dict[str, Any]]) -> None:
    names = ["prefix_path", "host", "port", "user", "kerb_ticket", "driver", "extra_conf", "args", "kwargs"]
    assert list(inspect.signature(HDFSStore).parameters) == names
    store = HDFSStore("/user/me", "namenode", 8020, "bob", "/ticket", "libhdfs", {"dfs.replication": "1"}, "/train")
    assert store.prefix == "hdfs://namenode:8020/user/me"
    assert store.get_train_data_path() == "/train"
    assert store.fs == "hdfs"
    (options,) = connected
    assert options == {
        "host": "namenode",
        "port": 8020,
        "user": "bob",
        "kerb_ticket": "/ticket",
        "extra_conf": {"dfs.replication": "1"},
    }


def test_the_storage_options_of_an_hdfs_store_make_the_same_store_elsewhere(connected: list[dict[str, Any]]) -> None:
    extra = {"dfs.replication": "1"}
    first = HDFSStore("hdfs://namenode:8020/a", user="bob", kerb_ticket="/t", extra_conf=extra)
    assert first.storage_options == {"user": "bob", "kerb_ticket": "/t", "extra_conf": extra}
    second = Store.create("hdfs://namenode:8020/a/b", storage_options=first.storage_options)
    third = pickle.loads(pickle.dumps(HDFSStore("hdfs://namenode:8020/a", storage_options=second.storage_options)))
    assert third.storage_options == first.storage_options
    for store in (first, second, third):
        assert store.fs == "hdfs"
    assert connected == [connected[0]] * 3
    # What is given by name beats what is in the options.
    assert HDFSStore("hdfs://n/a", user="al", storage_options={"user": "bob"}).storage_options == {"user": "al"}
    with pytest.raises(DataError, match=r"storage_options has 'host', 'token': HDFS takes user, kerb_ticket"):
        Store.create("hdfs://n/a", storage_options={"token": 1, "host": "n"})


@pytest.mark.parametrize("path", ["dbfs:/a/b", "dbfs:///a/b", "/dbfs/a/b", "file:/dbfs/a/b", "file:///dbfs/a/b"])
def test_every_dbfs_path_goes_through_the_mount(path: str) -> None:
    assert DBFSLocalStore.matches_dbfs(path)
    store = DBFSLocalStore(path)
    assert store.prefix == "/dbfs/a/b"
    assert store.get_checkpoint_path("r") == "/dbfs/a/b/runs/r/checkpoint.tf"


@pytest.mark.parametrize("path", ["dbfs:/Volumes/c/s/v/x", "/Volumes/c/s/v/x", "file:///Volumes/c/s/v/x"])
def test_a_path_of_a_volume_goes_through_its_mount(path: str) -> None:
    assert Store.create(path).prefix == "/Volumes/c/s/v/x"
    assert Store.create(path).get_localized_path(f"{path}/y") == "/Volumes/c/s/v/x/y"


def test_paths_that_are_not_dbfs_are_refused_by_its_store() -> None:
    assert not DBFSLocalStore.matches_dbfs("/data/dbfs")
    with pytest.raises(DataError, match="is not a DBFS path"):
        DBFSLocalStore("/data")


def test_every_family_is_asked_before_the_plain_one() -> None:
    assert Store._families == (HDFSStore, DBFSLocalStore, FilesystemStore)
    assert type(Store.create("/data")) is FilesystemStore


def test_an_unknown_scheme_is_named() -> None:
    with pytest.raises(DataError, match="nosuchscheme"):
        Store.create("nosuchscheme://x/y").check_writable()


# --- what workers get -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["{tmp_path}/s", "memory://remote-store/s"])
def test_a_worker_gets_plain_paths_and_functions_that_pickle(tmp_path: Path, prefix: str) -> None:
    store = Store.create(prefix.format(tmp_path=tmp_path))
    remote = pickle.loads(pickle.dumps(store.to_remote("run1", 3)))
    assert remote.train_data_path == store.get_train_data_path(3)
    assert remote.val_data_path == store.get_val_data_path(3)
    assert remote.test_data_path == store.get_test_data_path(3)
    assert (remote.runs_path, remote.run_path) == (store.get_runs_path(), store.get_run_path("run1"))
    assert (remote.checkpoint_path, remote.logs_path) == (
        store.get_checkpoint_path("run1"),
        store.get_logs_path("run1"),
    )
    assert (remote.checkpoint_filename, remote.logs_subdir, remote.saving_runs) == ("checkpoint", "logs", True)
    with remote.get_local_output_dir() as folder:
        (Path(folder) / "logs").mkdir()
        (Path(folder) / "logs" / "events").write_bytes(b"1")
        remote.sync(folder)
        assert store.read(f"{remote.run_path}/logs/events") == b"1"
    assert store.read(f"{remote.run_path}/logs/events") == b"1"
    assert Path(folder).exists() == store.is_local
    store.delete(store.prefix)


def test_metadata_of_a_data_set_lies_beside_it_one_for_each_host(tmp_path: Path) -> None:
    store = Store.create(tmp_path)
    path = store.get_data_metadata_path(f"{tmp_path}/train.0/")
    assert path.startswith(f"{tmp_path}/train.0_")
    assert path.endswith("_cached_metadata.pkl")
    assert path == store.get_data_metadata_path(f"{tmp_path}/train.0")


def test_a_saved_model_is_read_as_text(tmp_path: Path) -> None:
    store = Store.create(tmp_path)
    store.write(f"{tmp_path}/m.keras", bytes(range(256)))
    assert base64.b64decode(store.read_serialized_keras_model(f"{tmp_path}/m.keras", None, {})) == bytes(range(256))
    with pytest.raises(DataError, match="is a folder: save the model as one file"):
        store.read_serialized_keras_model(str(tmp_path))


# --- other filesystems ----------------------------------------------------------------------------------------------


AZURE = pytest.mark.needs("pyarrow>=16")


@pytest.mark.parametrize(
    ("url", "family", "inner"),
    [
        ("gs://anonymous@bucket/x", "gcs", "bucket/x"),
        ("gcs://anonymous@bucket/x", "gcs", "bucket/x"),
        pytest.param("abfss://container@account.dfs.core.windows.net/x", "abfs", "container/x", marks=AZURE),
        pytest.param("abfs://container@account.dfs.core.windows.net/x", "abfs", "container/x", marks=AZURE),
        ("memory://bucket/x", "py::fsspec+memory", "/bucket/x"),
    ],
)
def test_a_url_opens_the_filesystem_of_its_family(url: str, family: str, inner: str) -> None:
    filesystem, path = filesystems.open_filesystem(url)
    assert (filesystem.type_name, path) == (family, inner)


def test_a_scheme_that_no_one_knows_is_refused_with_its_name() -> None:
    with pytest.raises(DataError, match="cannot open 'zzz://x/y'"):
        filesystems.open_filesystem("zzz://x/y")


def test_hdfs_without_its_library_says_what_it_needs() -> None:
    with pytest.raises(DataError, match="CLASSPATH"):
        Store.create("hdfs://namenode:8020/x").exists("hdfs://namenode:8020/x")
