"""Columns that folders name: as pyarrow and Spark write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from hvd_cluster.data.reader import ParquetReader
from hvd_cluster.data.reading.hive import partitions
from hvd_cluster.errors import DataError


def test_values_are_integers_where_all_are_and_text_elsewhere() -> None:
    paths = ["year=2024/city=K%C3%B6ln/a", "year=-3/city=7/b", "year=__HIVE_DEFAULT_PARTITION__/city=x y/c"]
    assert partitions(paths) == [
        (("year", 2024), ("city", "Köln")),
        (("year", -3), ("city", "7")),
        (("year", None), ("city", "x y")),
    ]
    assert partitions(["a", "b/c"]) == [(), ()]


def test_folders_that_differ_are_refused() -> None:
    with pytest.raises(DataError, match=r"'b=1/y' name the columns \['b'\], but those of 'a=1/x' \['a'\]"):
        partitions(["a=1/x", "b=1/y"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    table = pa.table({"id": range(120), "year": [2020 + i % 3 for i in range(120)], "lang": ["de", "en"] * 60})
    ds.write_dataset(
        table, tmp_path / "in", format="parquet", partitioning=["year", "lang"], partitioning_flavor="hive"
    )
    return tmp_path / "in"


def test_a_column_of_the_folders_is_read_like_any_other(folder: Path) -> None:
    (batch,) = ParquetReader(folder, ["year", "id"], batch_size=120)
    assert list(batch) == ["year", "id"]
    assert (batch["year"] == 2020 + batch["id"] % 3).all()
    assert sorted(batch["id"].tolist()) == list(range(120))


def test_a_column_of_the_folders_whose_name_begins_with_an_underscore_hides_no_file(tmp_path: Path) -> None:
    for name in ("_year=2024", "_hidden", ".cache"):
        (tmp_path / name).mkdir()
        pq.write_table(pa.table({"id": [len(name)]}), tmp_path / name / "a.parquet")
    (batch,) = ParquetReader(tmp_path, ["id", "_year"], batch_size=1)
    assert (batch["id"].tolist(), batch["_year"].tolist()) == ([10], [2024])


def test_a_filter_on_the_folders_opens_no_other_file(folder: Path) -> None:
    for file in (folder / "year=2021").rglob("*.parquet"):
        # The footer stays whole: only the rows cannot be read any more.
        data = file.read_bytes()
        file.write_bytes(b"\0" * (len(data) // 3) + data[len(data) // 3 :])
    reader = ParquetReader(
        folder, ["id"], filters=[("year", "!=", 2021), ("lang", "=", "en")], batch_size=10, remainder="partial"
    )
    seen = [row for batch in reader for row in batch["id"].tolist()]
    assert sorted(seen) == [i for i in range(120) if i % 3 != 1 and i % 2]


def test_text_of_the_folders_goes_through_a_decode_function(folder: Path) -> None:
    reader = ParquetReader(folder, ["id", "lang"], decode={"lang": lambda text: text == "de"}, batch_size=120)
    (batch,) = reader
    assert (batch["lang"] == (batch["id"] % 2 == 0)).all()


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("files", [False, True])
def test_folders_and_files_in_a_list_have_the_columns_of_the_folders_that_they_lie_in(
    folder: Path, number: int, files: bool
) -> None:
    years = [2020, 2022][:number]
    paths = [folder / f"year={year}" for year in years]
    if files:
        paths = [file for path in paths for file in path.rglob("*.parquet")]
    (batch,) = ParquetReader(paths, ["id", "year"], batch_size=40 * number)
    assert sorted(batch["id"].tolist()) == [i for i in range(120) if 2020 + i % 3 in years]
    assert (batch["year"] == 2020 + batch["id"] % 3).all()


def test_only_folders_directly_above_a_path_of_a_list_count(tmp_path: Path) -> None:
    folder = tmp_path / "lr=0.1" / "data" / "year=2024"
    folder.mkdir(parents=True)
    pq.write_table(pa.table({"id": [1, 2]}), folder / "a.parquet")
    assert ParquetReader([folder], batch_size=1).schema.names == ("id", "year")
    assert ParquetReader(folder, batch_size=1).schema.names == ("id",)


def test_a_null_of_the_folders_is_one_of_its_column(tmp_path: Path) -> None:
    for year in ("2024", "__HIVE_DEFAULT_PARTITION__"):
        (tmp_path / f"year={year}").mkdir()
        pq.write_table(pa.table({"id": [1, 2]}), tmp_path / f"year={year}" / "a.parquet")
    options: Any = {"batch_size": 4, "shuffle": False, "remainder": "partial"}
    with pytest.raises(DataError, match="'year' holds 2 nulls"):
        list(ParquetReader(tmp_path, **options))
    (batch,) = ParquetReader(tmp_path, fill_nulls={"year": 0}, **options)
    assert batch["year"].tolist() == [2024, 2024, 0, 0]
    (batch,) = ParquetReader(tmp_path, drop_nulls=True, **options)
    assert batch["year"].tolist() == [2024, 2024]
    (batch,) = ParquetReader(
        tmp_path, filters=[[("year", "=", 2024), ("id", "=", 1)], [("id", "=", 2)]], fill_nulls={"year": 0}, **options
    )
    assert batch["id"].tolist() == [1, 2, 2]
