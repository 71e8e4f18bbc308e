"""A URL is served by pyarrow or by fsspec; what cannot be served says what it takes. No network."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from hvd_cluster.data.cache import MemoryCache
from hvd_cluster.data.files.filesystems import as_filesystem, normalize, open_filesystem, write_whole
from hvd_cluster.data.materializing import materialize
from hvd_cluster.data.reader import ParquetReader
from hvd_cluster.data.store import Store
from hvd_cluster.data.writing.folders import DatasetFolders
from hvd_cluster.errors import DataError


@pytest.mark.parametrize(
    ("url", "options", "package"),
    [("gs://bucket/a", {"token": "anon"}, "gcsfs"), ("abfs://container/a", {}, "adlfs"), ("az://c/a", {}, "adlfs")],
)
def test_a_package_that_is_missing_is_named(url: str, options: dict[str, Any], package: str) -> None:
    with pytest.raises(DataError, match=rf"'{url}' needs a package that is not installed: .*{package}"):
        open_filesystem(url, options)


@pytest.mark.parametrize("url", ["s3:/bucket/x", "gs:/bucket/x", "s3:bucket/x", "memory:/x"])
def test_a_url_with_one_slash_is_not_a_folder_below_the_current_one(url: str) -> None:
    scheme, _, rest = url.partition(":")
    with pytest.raises(DataError, match=f"'{url}' is not a URL: write {scheme}://{rest.lstrip('/')}, or, for a local"):
        Store.create(url)
    with pytest.raises(DataError, match="is not a URL"):
        open_filesystem(url)


@pytest.mark.parametrize("url", ["s3://", "memory:///"])
def test_a_url_without_a_place_is_not_a_folder_below_the_current_one(url: str) -> None:
    with pytest.raises(DataError, match="names no place"):
        Store.create(url)


@pytest.mark.parametrize("scheme", ["hdfs", "viewfs", "dbfs"])
def test_hadoops_spelling_with_one_slash_is_that_with_three(scheme: str) -> None:
    assert normalize(f"{scheme}:/a/b/") == normalize(f"{scheme}:///a/b") == f"{scheme}:///a/b"
    assert normalize(f"{scheme}:/") == normalize(normalize(f"{scheme}:/")) == f"{scheme}:///"
    assert normalize("hdfs://namenode/") == "hdfs://namenode"


def test_dbfs_is_reached_with_what_its_filesystem_takes_and_else_says_what_to_give() -> None:
    for url in ("dbfs:/models/x", "dbfs:///models/x"):
        with pytest.raises(DataError, match=r"(?s)'dbfs:///models/x'.*path below /Volumes or /dbfs.*'instance':"):
            Store.create(url).fs  # noqa: B018
        store = Store.create(url, storage_options={"instance": "localhost", "token": "t"})
        assert (store.fs.type_name, store.get_localized_path(store.prefix)) == ("py::fsspec+dbfs", "/models/x")


def test_hdfs_without_hadoop_says_what_to_set_in_one_line() -> None:
    for url in ("hdfs://namenode:8020/a", "viewfs://cluster/a"):
        with pytest.raises(
            DataError, match=f"cannot open '{url}': .*set JAVA_HOME, HADOOP_HOME and CLASSPATH"
        ) as caught:
            open_filesystem(url)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("fails", ["write", "move"])
def test_a_write_that_fails_leaves_no_temporary_file(tmp_path: Path, fails: str) -> None:
    class Broken(LocalFileSystem):
        """A server that hangs up."""

        protocol = "broken"
        cachable = False

        def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
            file = super()._open(path, mode, **options)
            if fails == "write":
                file.f.write(b"half")

                def write(data: bytes) -> int:
                    raise ConnectionResetError("the server reset the connection")

                file.write = write
            return file

        def mv(self, *paths: Any, **options: Any) -> None:
            raise ConnectionResetError("the server reset the connection")

    filesystem = as_filesystem(Broken())
    with pytest.raises(OSError, match="the server reset the connection"):
        write_whole(filesystem, f"{tmp_path}/folder/checkpoint", b"weights")
    assert list((tmp_path / "folder").iterdir()) == []


def test_data_goes_through_a_filesystem_of_fsspec_and_back() -> None:
    frame = pd.DataFrame({"id": np.arange(300), "x": [[float(i), 2.0 * i] for i in range(300)]})
    store = Store.create("memory://round-trip")
    dataset = materialize(frame, store, columns=["id", "x"], validation=0.2, num_proc=2)
    assert dataset.validation is not None
    assert dataset.validation.rows == 60
    seen: list[int] = []
    for rank in range(2):
        reader = ParquetReader(
            dataset, batch_size=30, rank=rank, size=2, remainder="partial", cache=MemoryCache(1 << 20)
        )
        for batch in reader:
            assert (batch["x"][:, 1] == 2 * batch["id"]).all()
            seen += batch["id"].tolist()
    assert len(set(seen)) == len(seen) == 240
    paths = ["memory://" + path.strip("/") for path in sorted({group.path for group in dataset.train.row_groups})]
    again = ParquetReader(paths, ["id"], batch_size=240)
    assert sorted(row for batch in again for row in batch["id"].tolist()) == sorted(seen)
    dataset.remove()
    with pytest.raises(DataError, match="there is no Parquet at"):
        ParquetReader(paths, batch_size=1)


class Remembering(LocalFileSystem):
    """Local files as s3fs serves objects: a folder is listed once, and that says what is in it from then on."""

    protocol = "remembering"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(os.fspath(path).removeprefix("remembering://")))

    def ls(self, path: str, detail: bool = False, **options: Any) -> Any:
        path = self._strip_protocol(path)
        try:
            entries = self.dircache[path]
        except KeyError:
            entries = self.dircache[path] = super().ls(path, detail=True, **options)
        return entries if detail else [entry["name"] for entry in entries]

    def info(self, path: str, **options: Any) -> Any:
        remembered = self._ls_from_cache(self._strip_protocol(path))
        if remembered is None:
            return super().info(path, **options)
        named = [entry for entry in remembered if entry["name"] == self._strip_protocol(path)]
        if not named:
            raise FileNotFoundError(path)
        return named[0]

    def _open(self, path: str, *args: Any, **options: Any) -> Any:
        file = super()._open(path, *args, **options)
        self.dircache.clear()  # what this instance does itself, it knows of
        return file

    def mkdir(self, path: str, **options: Any) -> None:
        super().mkdir(path, **options)
        self.dircache.clear()

    def mv(self, *paths: Any, **options: Any) -> None:
        super().mv(*paths, **options)
        self.dircache.clear()

    def rm(self, *paths: Any, **options: Any) -> None:
        super().rm(*paths, **options)
        self.dircache.clear()

    exists = AbstractFileSystem.exists


class Strict(LocalFileSystem):
    """Takes no argument that it does not know."""

    protocol = "strict"

    def __init__(self) -> None:
        super().__init__()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(os.fspath(path).removeprefix("strict://")))


def test_what_another_process_writes_is_seen_where_the_filesystem_remembers_listings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules["fsspec.registry"]._registry, "remembering", Remembering)
    users = Remembering()
    users.mkdir(str(tmp_path / "store"))
    assert users.ls(str(tmp_path / "store")) == []  # the user looked, in the instance that this process shares
    store = Store.create(f"remembering://{tmp_path}/store", storage_options={"auto_mkdir": True})
    shared = Store.create(f"remembering://{tmp_path}/store")
    for driver in (store, shared):
        assert not driver.exists(f"{driver.prefix}/a.parquet")
    train = f"{store.prefix}/train"
    with DatasetFolders(store, [train]) as folders:
        part = tmp_path / "store" / "train" / "a.parquet"
        part.write_bytes(b"")  # an executor does, through a filesystem of its own
        folders.complete({str(part)})
    (tmp_path / "store" / "a.parquet").write_bytes(b"")
    for driver in (store, shared):
        assert driver.exists(f"{driver.prefix}/a.parquet")
        assert [Path(path).name for path in driver.list(f"{driver.prefix}/train")] == ["_SUCCESS", "a.parquet"]


def test_a_filesystem_that_refuses_the_argument_against_remembering_is_opened_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules["fsspec.registry"]._registry, "strict", Strict)
    Store.create(f"strict://{tmp_path}").write(f"strict://{tmp_path}/a", b"1")
    assert (tmp_path / "a").read_bytes() == b"1"
