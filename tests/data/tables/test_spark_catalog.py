"""The name of a table in Spark's catalog is read like what it stands for, wherever data is given."""

from __future__ import annotations

import datetime as dt
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pytest
from table_rows import expected, rows_read

from hvd_cluster.data import ParquetReader, materialize, open_table
from hvd_cluster.data.tables import spark_catalog
from hvd_cluster.errors import DataError
from hvd_cluster.petastorm import make_batch_reader
from hvd_cluster.petastorm.converter import make_spark_converter

spark_kinds = pytest.mark.spark("local", "connect")
NAME = "default.catalog_rows"
ROWS = [{"id": i, "k": i % 3} for i in range(30)]


def ids(table: Any, **options: Any) -> list[int]:
    return sorted(int(row[0]) for row in rows_read(table, ["id"], **options).elements())


@pytest.fixture
def name(spark: Any, tmp_path: Path) -> Iterator[str]:
    """A partitioned Parquet table."""
    rows = spark.range(30).selectExpr("id", "id * 0.5D AS x", "id % 3 AS k")
    rows.write.partitionBy("k").option("path", (tmp_path / "files").as_uri()).saveAsTable(NAME)
    yield NAME
    spark.sql(f"DROP TABLE IF EXISTS {NAME}")


@spark_kinds
@pytest.mark.each_kind
def test_readers_and_converters_take_the_name_of_a_table(name: str, spark: Any, tmp_path: Path) -> None:
    for one in (name, f"spark_catalog.{name}"):
        assert rows_read(one, ["id", "k"], size=3) == expected(ROWS, ["id", "k"])
    assert ids(name, filters=[("k", "==", 1)]) == [*range(1, 30, 3)]
    with make_batch_reader(name) as reader:
        assert sorted(int(i) for batch in reader for i in batch.id) == [*range(30)]
    converter = make_spark_converter(name, parent_cache_dir_url=(tmp_path / "cache").as_uri())
    with converter, converter.make_torch_dataloader(num_epochs=1) as loader:
        assert sorted(int(i) for batch in loader for i in batch["id"]) == [*range(30)]
    assert materialize(name, tmp_path / "store", columns=["id", "k"]).train.rows == 30


@spark_kinds
def test_only_the_files_of_the_table_are_read(name: str, spark: Any, tmp_path: Path) -> None:
    spark.sql(f"ALTER TABLE {name} DROP PARTITION (k = 2)")  # an external table's files stay
    assert (tmp_path / "files" / "k=2").exists()
    spark.range(100, 105).selectExpr("id", "0D AS x").write.parquet((tmp_path / "elsewhere").as_uri())
    spark.sql(f"ALTER TABLE {name} ADD PARTITION (k = 7) LOCATION '{(tmp_path / 'elsewhere').as_uri()}'")
    with pytest.raises(DataError, match=f"only Spark can read the table '{name}'.*materialize"):
        open_table(name)  # a folder that does not name its partition
    spark.sql(f"ALTER TABLE {name} DROP PARTITION (k = 7)")
    assert ids(name) == [i for i in range(30) if i % 3 != 2]


@spark_kinds
def test_what_only_spark_can_read_says_so_and_is_materialized(spark: Any, tmp_path: Path) -> None:
    spark.sql("CREATE VIEW default.catalog_view AS SELECT id FROM range(5)")
    spark.sql(f"CREATE TABLE default.catalog_csv USING csv LOCATION '{(tmp_path / 'csv').as_uri()}' AS SELECT 1L AS id")
    place = (tmp_path / "defaults").as_uri()
    spark.sql(f"CREATE TABLE default.catalog_defaults (id BIGINT) USING parquet LOCATION '{place}'")
    spark.sql("INSERT INTO default.catalog_defaults VALUES (1)")
    spark.sql("ALTER TABLE default.catalog_defaults ADD COLUMN new BIGINT DEFAULT 42")
    spark.sql("INSERT INTO default.catalog_defaults VALUES (2, 3)")
    try:
        for kind, rows in (("view", 5), ("csv", 1), ("defaults", 2)):
            with pytest.raises(DataError, match=f"only Spark can read the table 'default.catalog_{kind}'"):
                ParquetReader(f"default.catalog_{kind}", batch_size=1)
            assert materialize(f"default.catalog_{kind}", tmp_path / kind, columns=["id"]).train.rows == rows
    finally:
        spark.sql("DROP VIEW default.catalog_view")
        for kind in ("csv", "defaults"):
            spark.sql(f"DROP TABLE default.catalog_{kind}")


@spark_kinds
def test_a_delta_table_of_the_catalog_is_read_at_one_version(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "delta"
    for begin in (0, 10):
        deltalake.write_deltalake(str(path), pa.table({"id": range(begin, begin + 10)}), mode="append")
    facts = {"Catalog": "spark_catalog", "Type": "EXTERNAL", "Provider": "delta", "Location": path.as_uri()}
    monkeypatch.setattr(spark_catalog, "_facts", lambda *_: facts)  # the session has no Delta of its own
    assert ids(name, size=1) == [*range(20)]
    assert ids(open_table(name, version=0)) == [*range(10)]
    assert ids(open_table(name, as_of=dt.datetime.now(dt.timezone.utc))) == [*range(20)]
    data = materialize(name, tmp_path / "store", columns=["id"])
    assert data.train.snapshot is not None
    assert str(data.train.snapshot).startswith("version 1 of the Delta table")
    assert len(make_spark_converter(name)) == 20
    with pytest.raises(DataError, match=r"open_table\(path\) once in the driver"):
        ParquetReader(name, batch_size=1, rank=0, size=2)
    for governed in ({**facts, "Catalog": "main"}, {**facts, "Location": "file:///nothing"}):
        monkeypatch.setattr(spark_catalog, "_facts", lambda *_, facts=governed: facts)
        assert materialize(name, tmp_path / "store", columns=["id"]).train.rows == 30


@pytest.mark.parametrize("name", ["default.catalog_nothing", "spark_catalog.default.catalog_nothing", "nowhere.x.y"])
def test_a_name_without_a_session_says_what_to_do(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "pyspark", raising=False)
    with pytest.raises(DataError, match=rf"no Parquet at '{name}'.*open_table\(name\) in the driver.*table's path"):
        ParquetReader(name, batch_size=1)
    with pytest.raises(DataError, match="open_table"):
        materialize(name, tmp_path / "store", columns=["id"])


@spark_kinds
def test_a_name_that_this_session_does_not_know_says_what_to_do(spark: Any) -> None:
    for name in ("default.catalog_nothing", "spark_catalog.default.catalog_nothing", "nowhere.x.y"):
        with pytest.raises(DataError, match="whose Spark session must know it"):
            open_table(name)
