"""One partition: what it writes, what it reports, and what it leaves when it fails."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hvd_cluster.data.schema import infer
from hvd_cluster.data.store import Store
from hvd_cluster.data.writing.part_writer import PartPlan, PartReport, write_part


def plan_of(table: pa.Table, folder: Path, **options: Any) -> PartPlan:
    folders = {"train_folder": str(folder / "train"), "validation_folder": str(folder / "val")}
    options = {"validation": None, **options}
    return PartPlan(store=Store.create(folder), schema=infer(table.schema), **folders, **options)


@pytest.fixture
def table() -> pa.Table:
    return pa.table({"id": np.arange(1000), "l": [[i, i + 1] for i in range(1000)]})


def test_row_groups_have_the_wished_size_however_the_rows_arrive(table: pa.Table, tmp_path: Path) -> None:
    report = write_part(plan_of(table, tmp_path, group_rows=300), 7, table.to_batches(max_chunksize=70))
    assert [group.rows for group in report.train] == [300, 300, 300, 100]
    assert report.rows == 1000
    assert report.validation == []
    assert report.part == 7
    written = pq.read_table(report.train[0].path)
    assert written["id"].to_pylist() == list(range(1000))
    assert written["l"].type == pa.list_(pa.int64(), 2)
    assert not (tmp_path / "val").exists()


def test_a_report_travels_as_json(table: pa.Table, tmp_path: Path) -> None:
    report = write_part(plan_of(table, tmp_path, validation=0.5), 0, table.to_batches())
    assert PartReport.from_json(json.loads(json.dumps(report.to_json()))) == report
    assert {group.rows for group in (*report.train, *report.validation)} == {500}


def test_two_attempts_at_one_partition_do_not_meet(table: pa.Table, tmp_path: Path) -> None:
    plan = plan_of(table, tmp_path)
    one, other = (write_part(plan, 3, table.to_batches()) for _ in range(2))
    assert one.train[0].path != other.train[0].path


def test_an_attempt_that_fails_leaves_no_file(table: pa.Table, tmp_path: Path) -> None:
    def broken() -> Iterator[pa.RecordBatch]:
        yield from table.to_batches(max_chunksize=400)
        raise RuntimeError("the upstream stage died")

    with pytest.raises(RuntimeError, match="upstream"):
        write_part(plan_of(table, tmp_path, group_rows=100, validation=0.5), 0, broken())
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_after_the_first_null_nothing_is_written_but_all_are_counted(tmp_path: Path) -> None:
    table = pa.table({"n": [1, None] * 500})
    report = write_part(plan_of(table, tmp_path), 0, table.to_batches(max_chunksize=100))
    assert report.train == []
    assert report.stats.columns["n"].nulls == 500
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_an_empty_partition_writes_nothing(table: pa.Table, tmp_path: Path) -> None:
    report = write_part(plan_of(table, tmp_path), 0, table.slice(0, 0).to_batches())
    assert (report.rows, report.train) == (0, [])
    assert list(tmp_path.iterdir()) == []


def test_dictionaries_are_stored_as_their_values(tmp_path: Path) -> None:
    table = pa.table({"n": pa.array([5, 6, 5]).dictionary_encode(), "s": pa.array(["a", "b", "a"]).dictionary_encode()})
    report = write_part(plan_of(table, tmp_path), 0, table.to_batches())
    assert pq.read_table(report.train[0].path).to_pydict() == {"n": [5, 6, 5], "s": ["a", "b", "a"]}


def test_folders_that_somebody_has_taken_away_are_not_made_again(table: pa.Table, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_part(plan_of(table, tmp_path, makes_folders=False), 0, table.to_batches())
    assert list(tmp_path.iterdir()) == []
