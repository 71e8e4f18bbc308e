"""pyarrow's data sets are read as Arrow reads them: partitions, files of several formats, filters."""

from __future__ import annotations

import datetime as dt
import pickle
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import delta_log
import deltalake
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv
import pyarrow.dataset as ds
import pyarrow.fs
import pyarrow.parquet as pq
import pytest
from table_rows import expected, rows_read

from hvd_cluster.data import ParquetReader, materialize, open_table
from hvd_cluster.data.cache import DiskCache, MemoryCache
from hvd_cluster.errors import DataError

ROWS = [{"id": i, "x": i * 0.5, "k": i % 3} for i in range(100)]


def written(folder: Path, **options: object) -> ds.Dataset:
    partitioning = ds.partitioning(pa.schema([("k", pa.int32())]), flavor="hive")
    table = pa.Table.from_pylist(ROWS)
    ds.write_dataset(table, folder, partitioning=partitioning, max_rows_per_group=8, **options)
    return ds.dataset(folder, partitioning=partitioning, format=options["format"])


@pytest.mark.parametrize("file_format", ["parquet", "feather", "csv"])
def test_every_row_of_every_file_format_comes_once(tmp_path: Path, file_format: str) -> None:
    dataset = written(tmp_path / "data", format=file_format)
    assert rows_read(dataset, ["id", "x", "k"], size=3) == expected(ROWS, ["id", "x", "k"])
    assert rows_read(pickle.loads(pickle.dumps(open_table(dataset))), ["k", "id"]) == expected(ROWS, ["k", "id"])


def test_a_filter_of_the_data_set_is_refused_and_one_of_the_reader_holds(tmp_path: Path) -> None:
    dataset = written(tmp_path / "data", format="parquet")
    rows = [row for row in ROWS if row["id"] >= 20 and row["k"] == 1]
    assert rows_read(dataset, ["id"], filters=[("k", "==", 1), ("id", ">=", 20)]) == expected(rows, ["id"])
    with pytest.raises(DataError, match="without its filter"):
        open_table(dataset.filter(pc.field("id") >= 20))


def test_files_of_partitions_that_a_filter_rules_out_are_not_opened(tmp_path: Path) -> None:
    dataset = written(tmp_path / "data", format="parquet")
    for file in (tmp_path / "data" / "k=2").iterdir():
        file.write_bytes(b"")
    rows = [row for row in ROWS if row["k"] == 0]
    assert rows_read(dataset, ["id"], filters=[("k", "==", 0)]) == expected(rows, ["id"])


@pytest.mark.parametrize(
    ("stored", "wanted", "condition"),
    [
        (pa.array([0.1]), pa.float32(), ("x", ">", 0.1)),
        (pa.array([0.1], pa.float32()), pa.float16(), ("x", "<", 0.1)),
        (pa.array([Decimal("0.3000000000000000000001")]), pa.float64(), ("x", "==", 0.3)),
        (pa.array([0.126]), pa.decimal128(9, 2), ("x", ">", Decimal("0.129"))),
        (pa.array([1_704_085_200], pa.timestamp("s")), pa.date32(), ("x", "==", dt.date(2024, 1, 1))),
        (pa.array([1 << 40]), pa.int64(), ("x", "==", 1 << 40)),
    ],
)
def test_bounds_in_another_type_than_the_rows_decide_nothing(
    tmp_path: Path, stored: pa.Array, wanted: pa.DataType, condition: Any
) -> None:
    pq.write_table(pa.table({"id": [7], "x": stored}), tmp_path / "a.parquet")
    dataset = ds.dataset(tmp_path, schema=pa.schema([("id", pa.int64()), ("x", wanted)]))
    assert rows_read(dataset, ["id"], size=1, filters=[condition]) == expected([{"id": 7}], ["id"])


def test_columns_that_files_lack_are_null(tmp_path: Path) -> None:
    for number, columns in enumerate([{"id": [1, 2]}, {"id": [3], "y": [7]}]):
        pq.write_table(pa.table(columns), tmp_path / f"{number}.parquet")
    dataset = ds.dataset(tmp_path, schema=pa.schema([("y", pa.int64()), ("id", pa.int64())]))
    rows = [{"id": 1}, {"id": 2}, {"id": 3, "y": 7}]
    assert rows_read(dataset, ["id", "y"]) == expected(rows, ["id", "y"])
    with pytest.raises(DataError, match="'y'"):
        materialize(dataset, tmp_path / "store", columns=["id", "y"])


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_files_that_are_read_in_another_way_are_cached_and_copied_again(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text("x,held\n16777217,1\n2,0\n3,0\n")
    cache = MemoryCache(1 << 20) if kind == "memory" else DiskCache(tmp_path / "cache", 1 << 20)
    options = [
        (pa.float32(), ds.CsvFileFormat(), 16777216),
        (pa.float64(), ds.CsvFileFormat(), 16777217),
        (pa.float64(), ds.CsvFileFormat(convert_options=csv.ConvertOptions(null_values=["16777217"])), 7),
    ]
    for dtype, file_format, first in options:
        dataset = ds.dataset(path, schema=pa.schema([("x", dtype), ("held", pa.int64())]), format=file_format)
        reader = ParquetReader(dataset, ["x"], batch_size=1, shuffle=False, cache=cache, fill_nulls={"x": 7.0})
        assert next(iter(reader))["x"].tolist() == [first]
        if first == 7:  # nulls are not copied
            continue
        copied = materialize(dataset, tmp_path / "store", columns=["x"], in_place=False, reuse=True)
        assert next(iter(ParquetReader(copied, batch_size=1, shuffle=False)))["x"].tolist() == [first]


def test_a_reader_resumes_in_a_data_set(tmp_path: Path) -> None:
    dataset = written(tmp_path / "data", format="parquet")
    reader = ParquetReader(dataset, ["id"], batch_size=4, seed=5)
    batches = iter(reader)
    first = [next(batches)["id"].tolist() for _ in range(7)]
    again = ParquetReader(dataset, ["id"], batch_size=4, seed=5)
    again.load_state_dict(reader.state_dict())
    rest = [batch["id"].tolist() for batch in again]
    assert sorted(np.concatenate(first + rest)) == [*range(100)]
    pq.write_table(pa.table({"id": [1], "x": [1.0]}), next((tmp_path / "data" / "k=0").iterdir()))
    with pytest.raises(DataError):
        ParquetReader(dataset, ["id"], batch_size=4, seed=5).load_state_dict(reader.state_dict())


def test_a_state_notices_other_values_in_any_file_of_a_union_and_of_files_listed_twice(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        pq.write_table(pa.table({"id": [1, 2, 3]}), tmp_path / name / "1.parquet")
    union = ds.dataset([ds.dataset(tmp_path / "a"), ds.dataset(tmp_path / "b")])
    twice = ds.dataset([str(tmp_path / "b" / "1.parquet")] * 2)
    states = [ParquetReader(dataset, batch_size=2).state_dict() for dataset in (union, twice)]
    for dataset, state in zip((union, twice), states, strict=True):
        ParquetReader(dataset, batch_size=2).load_state_dict(state)
    pq.write_table(pa.table({"id": [4, 5, 6]}), tmp_path / "b" / "1.parquet")
    for dataset, state in zip((union, twice), states, strict=True):
        with pytest.raises(DataError, match="files_crc was"):
            ParquetReader(dataset, batch_size=2).load_state_dict(state)
    pq.write_table(pa.table({"id": [1, 2, 3]}), tmp_path / "b" / "1.parquet")
    options: dict[str, Any] = {"columns": ["id"], "in_place": False, "reuse": True}
    copies = [materialize(union, tmp_path / "store", **options).train.row_groups for _ in range(2)]
    assert copies[0] == copies[1], "unchanged files are not copied again"


def test_nulls_among_the_distinct_values_of_dictionaries_are_filled_dropped_and_refused(tmp_path: Path) -> None:
    numbers = pa.DictionaryArray.from_arrays(pa.array([0, 1, None, 0]), pa.array([7.0, None]))
    texts = pa.DictionaryArray.from_arrays(pa.array([0, 1, 0, 0]), pa.array(["abc", None]))
    ds.write_dataset(pa.table({"x": numbers, "s": texts}), tmp_path, format="feather")
    dataset = ds.dataset(tmp_path, format="feather")
    options: dict[str, Any] = {"batch_size": 4, "shuffle": False, "remainder": "partial"}
    (batch,) = ParquetReader(dataset, ["x"], fill_nulls={"x": 1.0}, **options)
    assert batch["x"].tolist() == [7, 1, 1, 7]
    (batch,) = ParquetReader(dataset, ["x"], drop_nulls=["x"], **options)
    assert batch["x"].tolist() == [7, 7]
    (batch,) = ParquetReader(dataset, ["s"], decode={"s": len}, drop_nulls=True, **options)
    assert batch["s"].tolist() == [3, 3, 3]
    with pytest.raises(DataError, match="column 's' holds 1 null"):
        list(ParquetReader(dataset, ["s"], decode={"s": len}, **options))


@pytest.mark.parametrize("file_format", ["feather", "parquet"])
def test_files_that_are_mapped_into_memory_are_never_written_to(tmp_path: Path, file_format: str) -> None:
    lists = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(8.0)), 2)
    table = pa.table({"y": np.arange(4.0), "l": lists})
    if file_format == "parquet":
        pq.write_table(table, tmp_path / "1", compression="NONE", use_dictionary=False)
    else:
        ds.write_dataset(table, tmp_path, format=file_format)
    dataset = ds.dataset(tmp_path, format=file_format, filesystem=pyarrow.fs.LocalFileSystem(use_mmap=True))

    def add(row: dict[str, Any]) -> dict[str, Any]:
        row["l"] += 1
        return row

    for _ in range(2):
        (batch,) = ParquetReader(dataset, batch_size=4, shuffle=False)
        assert [tensor.add_(1).sum() for tensor in batch.values()] == [10, 36]
        (batch,) = ParquetReader(dataset, batch_size=4, shuffle=False, transformation_fn=add)
        assert batch["l"].sum() == 36


def test_files_of_a_delta_table_are_read_if_one_version_has_all_of_them(tmp_path: Path) -> None:
    path = tmp_path / "a b"
    deltalake.write_deltalake(path, pa.table({"id": [*range(10)], "k": [0, 1] * 5}), partition_by=["k"])
    deltalake.DeltaTable(path).delete("id >= 5")
    deltalake.write_deltalake(path, pa.table({"id": [5], "k": [0]}), mode="append")
    wanted = {0: range(10), 1: range(5), 2: range(6)}
    for version, ids in wanted.items():
        table = deltalake.DeltaTable(path, version=version)
        files = ds.dataset([unquote(uri) for uri in table.file_uris()])
        for dataset in (table.to_pyarrow_dataset(), files, ds.dataset(files.files[0])):
            whole = dataset.files == files.files or dataset.filesystem.type_name != "local"
            rows = [{"id": i} for i in ids] if whole else dataset.to_table(columns=["id"]).to_pylist()
            assert rows_read(dataset, ["id"]) == expected(rows, ["id"])
    every = ds.dataset(path, format="parquet", exclude_invalid_files=True)
    (tmp_path / "link").symlink_to(path)
    linked = ds.dataset(tmp_path / "link", format="parquet", exclude_invalid_files=True)
    for dataset in (every, linked, ds.dataset([every, ds.dataset(every.files[0])])):
        with pytest.raises(DataError, match="files of the Delta table in .*give the path of the table"):
            open_table(dataset)


def test_files_with_deletion_vectors_are_refused(tmp_path: Path) -> None:
    deltalake.write_deltalake(tmp_path / "t", pa.table({"id": [1, 2]}))
    (file,) = delta_log.live_adds(tmp_path / "t")
    assert open_table(ds.dataset(tmp_path / "t" / file)).fragments(["id"])
    delta_log.delete_rows(tmp_path / "t", file, [0])
    with pytest.raises(DataError, match="files of the Delta table"):
        open_table(ds.dataset(tmp_path / "t" / file))


def test_files_of_other_tables_are_refused(tmp_path: Path) -> None:
    ds.write_dataset(pa.table({"id": [1]}), tmp_path / "t", format="parquet")
    (tmp_path / "t" / "_versions").mkdir()  # a folder of its own in the table stands for the format
    with pytest.raises(DataError, match="files of the Lance table"):
        open_table(ds.dataset(tmp_path / "t", format="parquet"))


def test_rows_in_memory_are_refused_with_what_to_give_instead() -> None:
    with pytest.raises(DataError, match=r"give the pyarrow\.Table itself"):
        open_table(ds.dataset(pa.table({"id": [1]})))
