"""From a Spark DataFrame, on every kind of session, to Parquet that the reader takes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from hvd_cluster.data.columns.vectors import vector_type
from hvd_cluster.data.dataset import Dataset, Split
from hvd_cluster.data.materializing import materialize
from hvd_cluster.data.reader import ParquetReader
from hvd_cluster.data.reading.tensors import to_tensors
from hvd_cluster.data.schema import ColumnKind
from hvd_cluster.data.store import Store
from hvd_cluster.errors import DataError

pytestmark = pytest.mark.spark

ROWS = 60


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "store")


@pytest.fixture
def frame(spark: Any) -> Any:
    """Columns of every kind; row i is told by ``id``."""
    from pyspark.ml.linalg import Vectors

    rows = [
        (
            i,
            float(i) / 2,
            i % 2 == 0,
            [float(i), 1.0],
            Vectors.dense([i, 0.0, 2.0]) if i % 3 else Vectors.sparse(3, {0: float(i), 2: 2.0}),
            f"name {i}",
            1 if i % 4 == 0 else 0,
        )
        for i in range(ROWS)
    ]
    return spark.createDataFrame(rows, ["id", "x", "b", "l", "v", "s", "held"])


def everything(dataset: Dataset, split: Split | None) -> dict[str, torch.Tensor]:
    """All rows of a split, sorted by id."""
    assert split is not None
    reader = ParquetReader(split, dataset.schema, dataset.store, batch_size=7, remainder="partial")
    batches = list(reader.epoch(0))
    whole = {name: torch.cat([batch[name] for batch in batches]) for name in dataset.schema.names}
    order = whole["id"].argsort()
    return {name: tensor[order] for name, tensor in whole.items()}


@pytest.mark.each_kind
def test_every_kind_of_column_arrives_as_the_same_numbers(frame: Any, store: Store) -> None:
    dataset = materialize(frame, store, columns=["id", "x", "b", "l", "v"], num_proc=2)
    rows = everything(dataset, dataset.train)
    ids = torch.arange(ROWS)
    assert torch.equal(rows["id"], ids)
    assert torch.equal(rows["x"], ids.double() / 2)
    assert torch.equal(rows["b"], ids % 2 == 0)
    assert torch.equal(rows["l"], torch.stack([ids.double(), torch.ones(ROWS).double()], 1))
    assert torch.equal(
        rows["v"], torch.stack([ids.double(), torch.zeros(ROWS).double(), torch.full((ROWS,), 2.0).double()], 1)
    )
    assert dataset.schema["v"].kind is ColumnKind.VECTOR
    assert dataset.schema["v"].shape == (3,)
    assert dataset.schema["l"].shape == (2,)


def test_a_ratio_splits_the_rows_once_and_the_same_way_each_time(frame: Any, store: Store) -> None:
    first = materialize(frame, store, columns=["id"], validation=0.25, seed=3)
    second = materialize(frame, store, columns=["id"], validation=0.25, seed=3)
    train, held_out = everything(first, first.train)["id"], everything(first, first.validation)["id"]
    assert sorted(torch.cat([train, held_out]).tolist()) == list(range(ROWS))
    assert 9 <= len(held_out) <= 21
    assert torch.equal(held_out, everything(second, second.validation)["id"])
    assert set(first.folders).isdisjoint(second.folders)


def test_a_column_marks_the_rows_for_validation_and_is_not_a_feature(frame: Any, store: Store) -> None:
    dataset = materialize(frame, store, columns=["id"], validation="held")
    assert everything(dataset, dataset.validation)["id"].tolist() == list(range(0, ROWS, 4))
    assert dataset.schema.names == ("id",)


def test_the_order_of_rows_does_not_depend_on_the_number_of_workers(frame: Any, store: Store) -> None:
    orders = []
    for num_proc in (1, 2):
        dataset = materialize(frame, store, columns=["id"], num_proc=num_proc)
        reader = ParquetReader(dataset.train, dataset.schema, dataset.store, batch_size=10)
        orders.append([batch["id"].tolist() for batch in reader.epoch(0)])
    assert orders[0] == orders[1]


def test_nulls_and_ragged_lists_are_all_reported_at_once_with_their_counts(spark: Any, store: Store) -> None:
    rows = [(1, [1.0]), (None, [1.0, 2.0]), (None, [3.0])]
    frame = spark.createDataFrame(rows, "n int, l array<double>")
    with pytest.raises(DataError) as caught:
        materialize(frame, store, columns=["n", "l"])
    assert "column 'n' holds 2 nulls" in str(caught.value)
    assert "column 'l' holds lists of different lengths, 1 and 2" in str(caught.value)
    assert store.list(store.prefix) == []


def test_a_wrong_column_name_is_known_before_any_job_runs(frame: Any, store: Store) -> None:
    with pytest.raises(DataError, match="no column 'ID'; did you mean 'id'") as caught:
        materialize(frame, store, columns=["ID", "x"])
    assert "'held'" in str(caught.value)


def test_an_empty_dataframe_is_refused(frame: Any, store: Store) -> None:
    with pytest.raises(DataError, match="no rows"):
        materialize(frame.where("id < 0"), store, columns=["id"])


def test_a_column_name_with_dots_and_backticks_is_one_column(spark: Any, store: Store) -> None:
    frame = spark.createDataFrame([(1, 2.0), (2, 3.0)], ["id", "a.b`c"])
    dataset = materialize(frame, store, columns=["id", "a.b`c"])
    assert everything(dataset, dataset.train)["a.b`c"].tolist() == [2.0, 3.0]


def test_vectors_written_by_spark_itself_are_read_in_place(frame: Any, store: Store, tmp_path: Path) -> None:
    path = str(tmp_path / "by_spark")
    frame.select("id", "v").coalesce(2).write.parquet(path)
    dataset = materialize(path, store, columns=["id", "v"])
    assert dataset.folders == ()
    assert torch.equal(everything(dataset, dataset.train)["v"][:, 0], torch.arange(ROWS).double())


def test_vectors_reach_map_in_arrow_in_the_layout_that_we_write(frame: Any) -> None:
    def echo(batches: Any) -> Any:
        import pyarrow as pa

        from hvd_cluster.data.reading.tensors import to_arrow

        for batch in batches:
            tensors = to_tensors(batch.select(["id", "v"]))
            scored = to_arrow(tensors["v"] * 2, vector_type())
            yield pa.RecordBatch.from_arrays([batch.column("id"), scored], names=["id", "v"])

    selected = frame.select("id", "v")
    rows = sorted(selected.mapInArrow(echo, selected.schema).collect(), key=lambda row: row["id"])
    assert [row["v"].toArray().tolist() for row in rows] == [[2.0 * i, 0.0, 4.0] for i in range(ROWS)]


# --- reuse, float32, progress ---------------------------------------------------------------------------------------


def test_the_same_plan_is_written_once_until_its_files_change(spark: Any, store: Store, tmp_path: Path) -> None:
    spark.range(0, 50, 1, 2).selectExpr("id", "id / 2 as x").write.parquet(str(tmp_path / "in"))

    def written(condition: str = "id % 5 > 0", **options: Any) -> Dataset:
        frame = spark.read.parquet(str(tmp_path / "in")).where(condition)
        return materialize(frame, store, columns=["id", "x"], reuse=True, **options)

    first = written()
    assert first.train.rows == 40
    assert written().train == first.train
    first.remove()  # leaves it to others
    assert written().train == first.train
    others = [written("id % 5 > 1"), written(float32=True), written(num_proc=2)]
    spark.range(0, 50, 1, 2).selectExpr("id", "id / 4 as x").write.mode("overwrite").parquet(str(tmp_path / "in"))
    others.append(written())
    paths = [dataset.train.row_groups[0].path for dataset in (first, *others)]
    assert len(set(paths)) == len(paths)
    assert torch.equal(everything(others[-1], others[-1].train)["x"][:2], torch.tensor([0.25, 0.5]).double())
    assert everything(others[1], others[1].train)["x"].dtype == torch.float32


def test_rows_that_were_made_in_the_session_are_told_apart(spark: Any, store: Store) -> None:
    datasets = [
        materialize(spark.createDataFrame([(i,), (i + 1,)], ["id"]), store, columns=["id"], reuse=True) for i in (0, 10)
    ]
    assert [everything(dataset, dataset.train)["id"].tolist() for dataset in datasets] == [[0, 1], [10, 11]]


@pytest.mark.each_kind
@pytest.mark.parametrize("query", ["TABLE", "SELECT id FROM"])
def test_a_view_that_was_replaced_is_written_again(spark: Any, store: Store, query: str) -> None:
    def written(first: int) -> Dataset:
        spark.range(first, first + 3, 1, 1).createOrReplaceTempView("replaced_view")
        return materialize(spark.sql(f"{query} replaced_view"), store, columns=["id"], reuse=True)

    try:
        datasets = [written(first) for first in (0, 0, 10, 0)]
    finally:
        spark.catalog.dropTempView("replaced_view")
    rows = [everything(dataset, dataset.train)["id"].tolist() for dataset in datasets]
    assert rows == [[0, 1, 2], [0, 1, 2], [10, 11, 12], [0, 1, 2]]
    assert datasets[0].train == datasets[1].train == datasets[3].train


@pytest.mark.each_kind
def test_one_frame_over_a_view_that_was_replaced_has_the_rows_that_spark_gives(spark: Any, store: Store) -> None:
    spark.range(3).createOrReplaceTempView("replaced_view")
    frame = spark.table("replaced_view")
    try:
        for first in (0, 10):
            spark.range(first, first + 3, 1, 1).createOrReplaceTempView("replaced_view")
            dataset = materialize(frame, store, columns=["id"], reuse=True)
            expected = sorted(row["id"] for row in frame.collect())  # a classic frame keeps the first view
            assert everything(dataset, dataset.train)["id"].tolist() == expected
    finally:
        spark.catalog.dropTempView("replaced_view")


def test_progress_ends_with_all_rows(frame: Any, store: Store) -> None:
    told: list[tuple[int, int | None]] = []
    materialize(
        frame, store, columns=["id"], validation="held", progress=lambda rows, total: told.append((rows, total))
    )
    assert told[-1] == (ROWS, ROWS)
    assert sorted(rows for rows, _ in told) == [rows for rows, _ in told]


def test_moments_dates_and_durations_arrive_as_counts(spark: Any, store: Store) -> None:
    moment, date, duration = (
        "timestamp'1970-01-02 00:00:00 UTC'",
        "date'1970-01-11'",
        "interval '1:30' minute to second",
    )
    frame = spark.sql(f"select 1L as id, {moment} as t, {date} as d, {duration} as p")
    rows = everything(data := materialize(frame, store, columns=["id", "t", "d", "p"]), data.train)
    assert [data.schema[name].unit for name in ("t", "d", "p")] == ["us", "D", "us"]
    assert [rows[name].tolist() for name in ("t", "d", "p")] == [[86_400_000_000], [10], [90_000_000]]


@pytest.mark.each_kind
def test_the_name_of_a_table_is_read_by_spark(spark: Any, tmp_path: Path) -> None:
    rows = spark.range(20).selectExpr("id", "id * 2 AS x")
    rows.write.mode("overwrite").option("path", (tmp_path / "files").as_uri()).saveAsTable("default.named_rows")
    try:
        for name in ("default.named_rows", "spark_catalog.default.named_rows"):
            assert materialize(name, tmp_path / "store", columns=["id", "x"]).train.rows == 20
        with ThreadPoolExecutor(1) as pool:  # no session is active in its thread
            data = pool.submit(materialize, "default.named_rows", tmp_path / "store", columns=["id"]).result()
        assert data.train.rows == 20
    finally:
        spark.sql("DROP TABLE default.named_rows")
