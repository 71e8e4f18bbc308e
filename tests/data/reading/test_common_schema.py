"""Files of a data set that differ in their columns and types."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from hvd_cluster.data.materializing import materialize
from hvd_cluster.data.preprocessing import Preprocess
from hvd_cluster.data.reader import ParquetReader
from hvd_cluster.data.reading.common_schema import common_type
from hvd_cluster.errors import DataError
from hvd_cluster.estimators.frames import column_names
from hvd_cluster.petastorm import make_batch_reader

OLD = {"id": pa.array([0, 1]), "x": pa.array([0.5, 1.5], pa.float32())}
NEW = {"id": pa.array([2, 3]), "x": pa.array([0.1, 3.5]), "c": pa.array([7, None])}


@pytest.fixture(params=["the new column last", "the new column first"])
def folder(tmp_path: Path, request: Any) -> Path:
    names = ["0.parquet", "1.parquet"] if request.param.endswith("last") else ["1.parquet", "0.parquet"]
    for name, columns in zip(names, (OLD, NEW), strict=True):
        pq.write_table(pa.table(columns), tmp_path / name)
    return tmp_path


def rows_of(reader: ParquetReader) -> dict[int, list[float]]:
    found = {}
    for batch in reader:
        ids = batch.pop("id").tolist()
        found.update(zip(ids, zip(*(column.tolist() for column in batch.values()), strict=True), strict=True))
    return {key: list(value) for key, value in sorted(found.items())}


def test_a_column_of_some_files_only_is_null_in_the_others(folder: Path) -> None:
    assert set(column_names(str(folder))) == {"id", "x", "c"}
    read = {"columns": ["id", "x", "c"], "batch_size": 1}
    found = rows_of(ParquetReader(str(folder), **read, fill_nulls={"c": -1}))
    # float64 has the values of both files: 0.1 is not rounded to a float32.
    assert found == {0: [0.5, -1], 1: [1.5, -1], 2: [0.1, 7], 3: [3.5, -1]}
    assert rows_of(ParquetReader(str(folder), **read, drop_nulls=["c"])) == {2: [0.1, 7]}
    assert rows_of(ParquetReader(str(folder), **read, filters=[("c", ">", 0)])) == {2: [0.1, 7]}
    assert ParquetReader(str(folder), ["id"], batch_size=1, filters=[("c", "is null")]).rows == 3
    assert ParquetReader(str(folder), ["id", "x"], batch_size=1).schema["x"].dtype == "float64"
    with pytest.raises(DataError, match=r"column 'c' holds 2 nulls.*fill_nulls=\{'c': \.\.\.\}"):
        ParquetReader(str(folder), **read)
    with pytest.raises(DataError, match="column 'c' holds 3 nulls"):
        materialize(str(folder), folder / "work", columns=["id", "c"])


def test_ranks_see_one_schema_whatever_files_they_read(folder: Path) -> None:
    read = {"columns": ["id", "x", "c"], "batch_size": 1, "fill_nulls": {"c": -1}, "size": 2, "shuffle": False}
    readers = [ParquetReader(str(folder), rank=rank, **read) for rank in range(2)]
    assert readers[0].schema == readers[1].schema
    dtypes = [{name: column.dtype for name, column in batch.items()} for reader in readers for batch in reader]
    assert all(one == {"id": torch.int64, "x": torch.float64, "c": torch.int64} for one in dtypes)


def test_files_of_two_types_are_trained_on_in_place_and_copied(folder: Path) -> None:
    for options in ({}, {"in_place": False}):
        dataset = materialize(str(folder), folder / "work", columns=["id", "x"], **options)
        assert dataset.schema["x"].dtype == "float64"
        assert rows_of(ParquetReader(dataset, batch_size=1)) == {0: [0.5], 1: [1.5], 2: [0.1], 3: [3.5]}


def test_petastorms_reader_has_the_columns_of_all_files(folder: Path) -> None:
    with make_batch_reader(folder.as_uri(), shuffle_row_groups=False) as reader:
        batches = list(reader)
    found = {int(key): (x, c) for batch in batches for key, x, c in zip(batch.id, batch.x, batch.c, strict=True)}
    assert found[2] == (0.1, 7)
    assert np.isnan(found[0][1])
    assert {batch.x.dtype.name for batch in batches} == {"float64"}


def test_a_column_in_some_files_and_in_folders_of_others(tmp_path: Path) -> None:
    (tmp_path / "year=2024").mkdir()
    (tmp_path / "year=2025").mkdir()
    pq.write_table(pa.table({"x": [1.0]}), tmp_path / "year=2024" / "a.parquet")
    pq.write_table(pa.table({"x": [2.0], "year": pa.array([2025], pa.int32())}), tmp_path / "year=2025" / "b.parquet")
    batch = next(iter(ParquetReader(str(tmp_path), batch_size=2, shuffle=False)))
    assert batch["year"].tolist() == [2024, 2025]
    assert ParquetReader(str(tmp_path), ["x"], batch_size=1, filters=[("year", "==", 2024)]).rows == 1


LIST, FIXED = pa.list_(pa.int32()), pa.list_(pa.int64(), 2)


@pytest.mark.parametrize(
    ("one", "other", "common"),
    [
        (pa.int32(), pa.int64(), pa.int64()),
        (pa.uint8(), pa.int8(), pa.int16()),
        (pa.uint32(), pa.int64(), pa.int64()),
        (pa.uint64(), pa.int32(), pa.int64()),
        (pa.float32(), pa.float64(), pa.float64()),
        (pa.int32(), pa.float32(), pa.float64()),
        (pa.decimal128(5, 1), pa.decimal128(12, 4), pa.decimal128(12, 4)),
        (pa.decimal128(38, 2), pa.decimal128(20, 10), pa.decimal256(46, 10)),
        (pa.decimal128(5, 1), pa.int32(), pa.decimal128(11, 1)),
        (pa.timestamp("s"), pa.timestamp("us"), pa.timestamp("us")),
        (pa.timestamp("ms", "UTC"), pa.timestamp("us", "UTC"), pa.timestamp("us", "UTC")),
        (pa.time32("ms"), pa.time64("ns"), pa.time64("ns")),
        (pa.duration("s"), pa.duration("ms"), pa.duration("ms")),
        (pa.date32(), pa.date64(), pa.date32()),
        (pa.string(), pa.large_string(), pa.large_string()),
        (pa.dictionary(pa.int32(), pa.string()), pa.string(), pa.string()),
        (pa.binary(4), pa.binary(), pa.binary()),
        (LIST, FIXED, pa.list_(pa.int64())),
        (pa.null(), pa.bool_(), pa.bool_()),
        (pa.string(), pa.int64(), None),
        (pa.bool_(), pa.int8(), None),
        (pa.date32(), pa.timestamp("us"), None),
        (pa.string(), pa.binary(), None),
    ],
)
def test_two_types_have_one_that_holds_both(one: Any, other: Any, common: Any) -> None:
    assert common_type(one, other) == common_type(other, one) == common


@pytest.mark.parametrize(
    ("one", "other", "wanted"),
    [
        (pa.array([1], pa.timestamp("s")), pa.array([1_000_001], pa.timestamp("us")), [1_000_000, 1_000_001]),
        (pa.array([Decimal("1.5")]), pa.array([Decimal("2.125")]), [1.5, 2.125]),
        (pa.array([dt.date(1970, 1, 2)]), pa.array([dt.date(1970, 1, 3)], pa.date64()), [1, 2]),
        (pa.array([1], pa.uint8()), pa.array([-300], pa.int16()), [1, -300]),
        (pa.array([[1, 2]], LIST), pa.array([[3, 4]], FIXED), [[1, 2], [3, 4]]),
        (pa.array([3]), pa.array([0.25]), [3, 0.25]),
    ],
)
def test_values_of_two_types_are_read_unchanged(tmp_path: Path, one: Any, other: Any, wanted: list[Any]) -> None:
    for name, column in (("0", one), ("1", other)):
        pq.write_table(pa.table({"x": column}), tmp_path / f"{name}.parquet")
    reader = ParquetReader(str(tmp_path), batch_size=2, shuffle=False)
    assert next(iter(reader))["x"].tolist() == wanted
    assert (
        next(
            iter(ParquetReader(materialize(str(tmp_path), tmp_path / "w", columns=["x"]), batch_size=2, shuffle=False))
        )["x"].tolist()
        == wanted
    )


def test_text_of_two_layouts_is_decoded(tmp_path: Path) -> None:
    for name, column in (("0", pa.array(["a"])), ("1", pa.array(["b"], pa.large_string()))):
        pq.write_table(pa.table({"x": column}), tmp_path / f"{name}.parquet")
    read = ParquetReader(str(tmp_path), batch_size=2, shuffle=False, decode={"x": lambda text: float(ord(text))})
    assert next(iter(read))["x"].tolist() == [97.0, 98.0]


def test_bytes_of_several_layouts_are_decoded_transformed_and_preprocessed_together(tmp_path: Path) -> None:
    columns = [
        pa.array([b"abc"]),
        pa.array([b"def"], pa.binary(3)),
        pa.array([b"ghi"], pa.large_binary()),
        pa.nulls(1),
        pa.array([b"jkl"]).dictionary_encode(),
    ]
    for name, column in enumerate(columns):
        pq.write_table(pa.table({"x": column}), tmp_path / f"{name}.parquet")

    def first(value: bytes | None) -> int:
        return 0 if value is None else value[0]

    def preprocess(raw: dict[str, Any]) -> dict[str, Any]:
        return {"first": np.array([first(value) for value in raw["x"]])}

    options: dict[str, Any] = {"batch_size": 5, "shuffle": False, "remainder": "partial"}
    for read in (
        ParquetReader(str(tmp_path), decode={"x": first}, drop_nulls=True, **options),
        ParquetReader(str(tmp_path), decode={"x": first}, drop_nulls=True, filters=[("x", "!=", b"zzz")], **options),
        ParquetReader(str(tmp_path), transformation_fn=lambda row: {"x": row["x"][0]}, drop_nulls=True, **options),
    ):
        assert next(iter(read))["x"].tolist() == [97, 100, 103, 106]
    (batch,) = ParquetReader(str(tmp_path), preprocess=Preprocess(fn=preprocess, columns=("x",)), **options)
    assert batch["first"].tolist() == [97, 100, 103, 0, 106]


def test_whole_numbers_that_a_float_cannot_hold_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": pa.array([2**53 + 1])}), tmp_path / "0.parquet")
    pq.write_table(pa.table({"x": pa.array([0.5])}), tmp_path / "1.parquet")
    with pytest.raises(DataError, match="column 'x'"):
        next(iter(ParquetReader(str(tmp_path), batch_size=2)))
    dataset = materialize(str(tmp_path), tmp_path / "work", columns=["x"])
    with pytest.raises(DataError, match=r"column 'x' is int64 in .* holds the values of all files, but not these"):
        next(iter(ParquetReader(dataset, batch_size=2)))


def test_types_without_a_common_one_are_all_named_where_they_are_read(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1], "y": ["a"], "z": [1.0]}), tmp_path / "0.parquet")
    pq.write_table(pa.table({"x": ["1"], "y": [1], "z": [2.0]}), tmp_path / "1.parquet")
    with pytest.raises(DataError, match="'x' is string and was int64; 'y' is int64 and was string"):
        ParquetReader(str(tmp_path), batch_size=1)
    assert ParquetReader(str(tmp_path), ["z"], batch_size=1).rows == 2
    with pytest.raises(DataError, match="'y' is int64"):
        ParquetReader(str(tmp_path), ["z"], batch_size=1, filters=[("y", "==", 1)])
