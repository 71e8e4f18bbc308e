"""Readers on plain paths, lists of files, filesystems and URLs; what their batches can be given to."""

from __future__ import annotations

import functools
import importlib.util
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import pytest
import torch

from hvd_cluster.data.materializing import materialize
from hvd_cluster.data.reader import ParquetReader
from hvd_cluster.data.store import Store
from hvd_cluster.errors import DataError
from hvd_cluster.estimators.fit_data import StoredParquet
from hvd_cluster.estimators.frames import column_names
from hvd_cluster.petastorm import make_batch_reader, make_reader
from hvd_cluster.petastorm.converter import make_spark_converter


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    for part in range(3):
        ids = np.arange(part * 40, part * 40 + 40)
        pq.write_table(
            pa.table({"id": ids, "x": ids / 2, "s": ids.astype(str)}),
            tmp_path / "in" / f"{part}.parquet",
            row_group_size=16,
        )
    return tmp_path / "in"


def rows(reader: ParquetReader) -> list[int]:
    return [row for batch in reader for row in batch["id"].tolist()]


def test_every_way_to_name_the_same_data_gives_the_same_batches(folder: Path) -> None:
    read = functools.partial(ParquetReader, columns=["id", "x"], batch_size=10)
    expected = rows(read(folder))
    assert sorted(expected) == list(range(120))
    files = sorted(map(str, folder.glob("*.parquet")))
    assert rows(read(str(folder))) == expected
    assert rows(read(folder.as_uri())) == expected
    assert rows(read(files)) == expected
    assert rows(read(str(folder), filesystem=pa.fs.LocalFileSystem())) == expected
    assert rows(read("in", filesystem=pa.fs.SubTreeFileSystem(str(folder.parent), pa.fs.LocalFileSystem()))) == expected
    assert rows(read(str(folder), filesystem=fsspec.filesystem("file"))) == expected
    assert rows(read(str(folder), filesystem=Store.create(folder.parent))) == expected


def test_a_memory_filesystem_by_url(folder: Path) -> None:
    memory = fsspec.filesystem("memory")
    for file in folder.glob("*.parquet"):
        memory.pipe(f"/bucket/data/{file.name}", file.read_bytes())
    try:
        assert rows(ParquetReader("memory://bucket/data", ["id"], batch_size=10)) == rows(
            ParquetReader(folder, ["id"], batch_size=10)
        )
    finally:
        memory.rm("/bucket", recursive=True)


def test_all_columns_are_read_where_none_is_named(folder: Path) -> None:
    with pytest.raises(DataError, match=r"no tensor can be made of column 's' \(string\).*decode function"):
        ParquetReader(folder, batch_size=4)
    reader = ParquetReader(folder, batch_size=4, decode={"s": int})
    assert reader.schema.names == ("id", "x", "s")
    assert all(torch.equal(batch["s"], batch["id"]) for batch in reader)


def test_numpy_arrays_on_request(folder: Path) -> None:
    tensors = list(ParquetReader(folder, ["x", "id"], batch_size=7))
    arrays = list(ParquetReader(folder, ["x", "id"], batch_size=7, arrays="numpy"))
    assert len(tensors) == len(arrays) == 17
    for one, other in zip(tensors, arrays, strict=True):
        assert type(other["x"]) is np.ndarray
        assert np.array_equal(one["x"], other["x"])
        other["x"][:] = 0  # theirs alone


def test_tensors_go_through_dlpack_without_a_copy(folder: Path) -> None:
    batch = next(iter(ParquetReader(folder, ["x"], batch_size=7)))
    there = np.from_dlpack(batch["x"])
    assert there.__array_interface__["data"][0] == batch["x"].data_ptr()


#: In a process of its own: after an import of jax no process may fork, and other tests do.
_DLPACK = """
import itertools, sys, torch
from hvd_cluster.petastorm.converter import make_spark_converter
from hvd_cluster.data.materializing import materialize
from hvd_cluster.petastorm import make_batch_reader, make_reader
from hvd_cluster.data.reader import ParquetReader

def batches():
    return itertools.islice(ParquetReader(sys.argv[2], ["x", "id"], batch_size=7), 3)

if sys.argv[1] == "jax":
    import jax
    for batch in batches():
        for values in batch.values():
            assert jax.numpy.from_dlpack(values).tolist() == values.tolist()
else:
    import tensorflow
    for batch in batches():
        for values in batch.values():
            there = tensorflow.experimental.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(values))
            values += 1  # there too: nothing was copied
            assert there.numpy().tolist() == values.tolist()
"""


@pytest.mark.parametrize("library", ["jax", pytest.param("tensorflow", marks=pytest.mark.slow)])
def test_other_libraries_take_tensors_through_dlpack(folder: Path, library: str) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    command = [sys.executable, "-c", _DLPACK, library, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_data_loader_takes_a_reader(folder: Path) -> None:
    reader = ParquetReader(folder, ["id"], batch_size=10)
    loader = torch.utils.data.DataLoader(reader, batch_size=None)
    assert len(loader) == 12
    first = [batch["id"].tolist() for batch in loader]
    assert first == [batch["id"].tolist() for batch in reader.epoch(0)]
    second = [batch["id"].tolist() for batch in loader]
    assert second == [batch["id"].tolist() for batch in reader.epoch(1)]


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [1, 2])
def test_processes_of_a_data_loader_are_refused(folder: Path, num_workers: int) -> None:
    script = (
        "import sys, torch; from hvd_cluster.data.reader import ParquetReader\n"
        "reader = ParquetReader(sys.argv[1], ['id'], batch_size=10)\n"
        "next(iter(torch.utils.data.DataLoader(reader, batch_size=None, num_workers=int(sys.argv[2]))))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder), str(num_workers)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert f"num_workers={num_workers}" in done.stderr
    assert "begin each epoch where this reader stands: set it to 0" in done.stderr


def test_a_reader_pickles_with_its_position(folder: Path) -> None:
    reader = ParquetReader(folder, ["id"], batch_size=10)
    next(iter(reader))
    again = pickle.loads(pickle.dumps(reader))
    assert rows(again) == rows(reader)


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("nowhere", {}, "there is no Parquet at"),
        (7, {}, "cannot read data of type int: give a path"),
        (pd.DataFrame({"id": [1]}), {}, "^cannot read data of type DataFrame: give a path"),
        ([], {}, r"cannot read \[\]: give a path"),
        ("", {"columns": "id"}, "columns is the text 'id'"),
        ("", {"drop_nulls": "id"}, "drop_nulls is the text 'id'"),
        ("", {"columns": ["ID"]}, "there is no column 'ID'; did you mean 'id'"),
        (
            "",
            {"rank": 2, "size": 2, "arrays": "jax", "lanes": 0},
            "(?s)rank is 2 of size 2.*arrays is 'jax'.*lanes is 0",
        ),
        ("", {"batch_size": 2.5, "seed": None}, "(?s)batch_size is 2.5: it must be a whole number.*seed is None"),
        ("", {"remainder": "keep"}, "remainder is 'keep': it is one of drop, pad, partial, uneven"),
        ("", {"filesystem": object()}, "object is not a filesystem"),
    ],
)
def test_what_cannot_be_read_is_named(folder: Path, source: Any, options: dict[str, Any], message: str) -> None:
    where = folder / source if isinstance(source, str) else source
    with pytest.raises(DataError, match=message):
        ParquetReader(where, **{"columns": ["id"], "batch_size": 4, **options})


def test_a_file_that_is_listed_twice_is_named(folder: Path) -> None:
    file = next(folder.rglob("*.parquet"))
    for paths in ([file, file], [folder, file]):
        with pytest.raises(DataError, match=rf"{file.name}' is listed twice: list each file once"):
            ParquetReader(paths, batch_size=1)


def test_readers_read_ahead_in_threads_that_close_with_the_iteration(folder: Path) -> None:
    reader = ParquetReader(folder, ["id"], batch_size=4, window_bytes=64)
    for _ in reader:
        break
    assert reader.position.row == 4
    assert len(rows(reader)) == 116


@pytest.mark.needs("pyarrow>=15")
def test_a_byte_that_has_changed_on_the_disk_is_noticed(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "a.parquet"
    table = pa.table({"x": [float(i) for i in range(1000)]})
    pq.write_table(table, path, use_dictionary=False, compression="none", write_page_checksum=True)
    content = bytearray(path.read_bytes())
    content[2000] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"a\.parquet.*damaged"):
        list(ParquetReader(path, batch_size=100))


#: Formats whose tables are read, so that the error names a log that cannot be read.
OPENED = ("Delta", "Iceberg", "Lance")


def table_of(folder: Path, markers: str) -> Path:
    """Parquet in a folder and below a partition, with what marks a table of another format."""
    (folder / "k=1").mkdir(parents=True)
    for file in ("a.parquet", "k=1/b.parquet"):
        pq.write_table(pa.table({"id": np.arange(8)}), folder / file)
    (folder / markers).parent.mkdir(parents=True, exist_ok=True)
    (folder / markers).write_text("{}")
    return folder


@pytest.mark.parametrize(
    ("marker", "name"),
    [
        pytest.param("_delta_log/00000000000000000000.json", "Delta", marks=pytest.mark.needs("deltalake")),
        pytest.param("metadata/snap-1-abc.avro", "Iceberg", marks=pytest.mark.needs("pyiceberg")),
        pytest.param("metadata/v1.metadata.json", "Iceberg", marks=pytest.mark.needs("pyiceberg")),
        (".hoodie/hoodie.properties", "Hudi"),
        ("schema/schema-0", "Paimon"),
        pytest.param("_versions/1.manifest", "Lance", marks=pytest.mark.needs("pylance")),
    ],
)
def test_a_table_of_another_format_is_refused_by_every_entry(tmp_path: Path, marker: str, name: str) -> None:
    table = table_of(tmp_path / "lake" / "t", marker)
    (tmp_path / "link").symlink_to(table / "k=1")
    store = Store.create(tmp_path / "store", train_path=str(table), val_path=str(table))
    ways = {
        "folder": lambda: ParquetReader(str(table), batch_size=2),
        "url": lambda: ParquetReader(table.as_uri(), batch_size=2),
        "file": lambda: ParquetReader(str(table / "a.parquet"), batch_size=2),
        "files": lambda: ParquetReader([str(table / "a.parquet"), str(table / "k=1" / "b.parquet")], batch_size=2),
        "partition": lambda: ParquetReader(str(table / "k=1"), batch_size=2),
        "link": lambda: ParquetReader(str(tmp_path / "link"), batch_size=2),
        "pattern": lambda: ParquetReader(str(table / "*.parquet"), batch_size=2),
        "folder of tables": lambda: ParquetReader(str(table.parent), batch_size=2),
        "fsspec": lambda: ParquetReader(str(table), filesystem=fsspec.filesystem("file"), batch_size=2),
        "subtree": lambda: ParquetReader(
            "t/k=1",
            filesystem=pa.fs.SubTreeFileSystem(str(table.parent), pa.fs.LocalFileSystem()),
            batch_size=2,
        ),
        "materialize": lambda: materialize(str(table), tmp_path / "work", columns=["id"]),
        "columns": lambda: column_names(str(table)),
        "store": lambda: StoredParquet(store, None).dataset(["id"], 1),
        "store's columns": lambda: store.get_parquet_dataset(str(table)),
        "converter": lambda: make_spark_converter(str(table)),
        "make_reader": lambda: make_reader(table.as_uri()),
        "make_batch_reader": lambda: make_batch_reader(table.as_uri()),
        "make_batch_reader, files": lambda: make_batch_reader([(table / "a.parquet").as_uri()]),
    }
    told = {}
    for way, read in ways.items():
        try:
            read()
        except DataError as error:
            told[way] = str(error)
    assert set(told) == set(ways)
    readers = {"converter", "make_reader", "make_batch_reader"}
    opened = {"folder", "url", "materialize", "columns", "store", *readers} if name in OPENED else set()
    for way, text in told.items():
        assert f"the {name} table in" in text
        remedy = "leave filesystem out" if opened and way == "fsspec" else "fit() or materialize()"
        assert ("cannot open" if way in opened else remedy) in text
    assert not store.is_parquet_dataset(str(table))


@pytest.mark.needs("deltalake")
def test_a_delta_table_behind_an_fsspec_url_is_refused() -> None:
    memory = fsspec.filesystem("memory")
    with memory.open("/lake/t/part.parquet", "wb") as file:
        pq.write_table(pa.table({"id": [1]}), file)
    memory.pipe("/lake/t/_delta_log/0.json", b"{}")
    try:
        for url in ("memory://lake/t", "memory://lake/t/part.parquet", "memory://lake"):
            with pytest.raises(DataError, match="Delta table"):
                ParquetReader(url, batch_size=1)
    finally:
        memory.rm("/lake", recursive=True)
