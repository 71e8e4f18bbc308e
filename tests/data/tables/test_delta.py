"""Delta tables are read exactly: the live rows of one version, or a refusal that names what is not supported."""

from __future__ import annotations

import datetime as dt
import json
import pickle
import shutil
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import delta_log
import deltalake
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from delta_log import commit, delete_rows, live_adds, map_columns, newest, protocol
from table_rows import expected, rows_read

from hvd_cluster.data import ParquetReader, materialize, open_table
from hvd_cluster.errors import DataError


def numbers(begin: int, stop: int, **columns: Any) -> pa.Table:
    ids = np.arange(begin, stop)
    return pa.table({"id": ids, "x": ids * 0.5, **columns})


def write(path: Path, table: pa.Table, **options: Any) -> None:
    deltalake.write_deltalake(str(path), table, **options)


def ids(table: Any, **options: Any) -> list[int]:
    return sorted(int(row[0]) for row in rows_read(table, ["id"], **options).elements())


def test_removed_files_are_not_read(tmp_path: Path) -> None:
    write(tmp_path / "t", numbers(0, 100))
    write(tmp_path / "t", numbers(100, 150), mode="append")
    deltalake.DeltaTable(str(tmp_path / "t")).delete("id % 3 = 0")
    assert len(list((tmp_path / "t").glob("*.parquet"))) > len(live_adds(tmp_path / "t"))
    assert ids(open_table(tmp_path / "t")) == [i for i in range(150) if i % 3]


def test_an_earlier_version_is_read_by_number_and_by_time(tmp_path: Path) -> None:
    write(tmp_path / "t", numbers(0, 10))
    time.sleep(0.05)
    between = dt.datetime.now(dt.timezone.utc)
    time.sleep(0.05)
    write(tmp_path / "t", numbers(10, 20), mode="append")
    assert ids(open_table(tmp_path / "t", version=0)) == [*range(10)]
    assert ids(open_table(tmp_path / "t", version="1")) == [*range(20)]
    assert ids(open_table(tmp_path / "t", as_of=between)) == [*range(10)]
    assert ids(open_table(tmp_path / "t", as_of=between.isoformat())) == [*range(10)]
    assert str(open_table(tmp_path / "t").snapshot).startswith("version 1 of the Delta table")
    with pytest.raises(DataError, match="version 7"):
        open_table(tmp_path / "t", version=7)
    with pytest.raises(DataError, match="whole numbers"):
        open_table(tmp_path / "t", version="new")
    with pytest.raises(DataError, match="give one of them"):
        open_table(tmp_path / "t", version=1, as_of=between)


def test_a_time_before_the_first_version_is_refused(tmp_path: Path) -> None:
    before = dt.datetime.now(dt.timezone.utc) - dt.timedelta(seconds=1)
    write(tmp_path / "t", numbers(0, 10))
    first = (tmp_path / "t" / "_delta_log" / f"{0:020}.json").stat().st_mtime_ns // 1_000_000
    created = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc) + dt.timedelta(milliseconds=first)
    for source in (tmp_path / "t", deltalake.DeltaTable(str(tmp_path / "t"))):
        assert ids(open_table(source, as_of=created)) == [*range(10)]
        for moment in (before, created - dt.timedelta(milliseconds=1)):
            with pytest.raises(DataError, match=r"no version as of .*: version 0, the oldest in its log, is of 20"):
                open_table(source, as_of=moment)


def test_what_a_delta_table_object_has_loaded_is_read(tmp_path: Path) -> None:
    write(tmp_path / "t", numbers(0, 10))
    write(tmp_path / "t", numbers(10, 20), mode="append")
    table = deltalake.DeltaTable(str(tmp_path / "t"), version=0)
    assert ids(table) == [*range(10)]
    assert ids(open_table(table, version=1)) == [*range(20)]
    assert table.version() == 0
    dataset = materialize(table, tmp_path / "store", columns=["id", "x"])
    assert dataset.train.rows == 10
    assert dataset.train.snapshot is not None
    assert dataset.train.snapshot.version == "0"


PARTITIONS = pa.table(
    {
        "id": [1, 2, 3, 4],
        "text": ["a b", "c/d=e", "ü%20", None],
        "whole": pa.array([1, -2, None, 4], pa.int32()),
        "day": pa.array([dt.date(2024, 2, 29), None, dt.date(1969, 12, 31), dt.date(2026, 1, 1)]),
        "flag": [True, False, None, True],
        "money": pa.array([Decimal("1.5"), None, Decimal("-2"), Decimal("3")], pa.decimal128(10, 2)),
        "moment": pa.array([0, 1_500_000, None, 1_700_000_000_123_456], pa.timestamp("us", "UTC")),
        "bytes": [b"\0\xff", b"ab", None, b"\\u0041"],
        "real": pa.array([0.5, None, -1e30, 3.0]),
    }
)


@pytest.mark.parametrize("name", [name for name in PARTITIONS.column_names if name != "id"])
def test_partition_values_have_the_type_of_their_column(tmp_path: Path, name: str) -> None:
    table = PARTITIONS.select(["id", name])
    write(tmp_path / "t", table, partition_by=[name])
    opened = open_table(tmp_path / "t")
    assert opened.arrow_schema.field(name).type == table.schema.field(name).type
    assert_same_rows(opened, table)


def assert_same_rows(opened: Any, table: pa.Table) -> None:
    """A table's rows, read as they are."""
    from hvd_cluster.data.reading.table_columns import TableColumns

    chosen = TableColumns(opened, raw=table.column_names)
    read = pa.concat_tables([chosen.read(group, table.column_names) for group in chosen.row_groups])
    plain = pa.table([column.cast(table.schema.field(i).type) for i, column in enumerate(read.columns)], table.schema)
    assert plain.sort_by("id").to_pylist() == table.sort_by("id").to_pylist()


def test_an_added_column_is_null_in_older_files(tmp_path: Path) -> None:
    write(tmp_path / "t", numbers(0, 5))
    write(tmp_path / "t", numbers(5, 8, new=[1, 2, 3]), mode="append", schema_mode="merge")
    rows = [{"id": i, "new": None if i < 5 else i - 4} for i in range(8)]
    assert rows_read(open_table(tmp_path / "t"), ["id", "new"]) == expected(rows, ["id", "new"])
    with pytest.raises(DataError, match="'new' holds 5 nulls"):
        ParquetReader(tmp_path / "t", batch_size=2)


@pytest.mark.parametrize("inline", [False, True])
def test_rows_of_deletion_vectors_are_not_read(tmp_path: Path, inline: bool) -> None:
    write(tmp_path / "t", numbers(0, 5000), writer_properties=deltalake.WriterProperties(max_row_group_size=1024))
    write(tmp_path / "t", numbers(5000, 5100), mode="append")
    path = next(
        path for path, add in live_adds(tmp_path / "t").items() if json.loads(add["stats"])["numRecords"] == 5000
    )
    gone = {0, 1023, 1024, 3000, 4999, *range(2048, 2100)}
    delete_rows(tmp_path / "t", path, gone, inline=inline)
    assert ids(open_table(tmp_path / "t")) == [i for i in range(5100) if i not in gone]
    delete_rows(tmp_path / "t", path, range(5000))
    assert ids(open_table(tmp_path / "t")) == [*range(5000, 5100)]
    assert ids(open_table(tmp_path / "t", version=1)) == [*range(5100)]


def test_a_filter_and_a_held_out_part_see_only_live_rows(tmp_path: Path) -> None:
    write(tmp_path / "t", numbers(0, 1000))
    (path,) = live_adds(tmp_path / "t")
    delete_rows(tmp_path / "t", path, range(0, 1000, 3))
    live = [i for i in range(1000) if i % 3]
    assert ids(open_table(tmp_path / "t"), filters=[("id", "<", 500)]) == [i for i in live if i < 500]
    dataset = materialize(str(tmp_path / "t"), tmp_path / "store", columns=["id"], validation=0.25)
    assert dataset.validation is not None
    parts = [
        [
            row
            for batch in ParquetReader(part, dataset.schema, dataset.store, batch_size=9, remainder="partial")
            for row in batch["id"].tolist()
        ]
        for part in (dataset.train, dataset.validation)
    ]
    assert [len(part) for part in parts] == [499, 167]
    assert sorted(parts[0] + parts[1]) == live


def test_renamed_and_swapped_columns_are_found(tmp_path: Path) -> None:
    write(tmp_path / "t", numbers(0, 20, p=[i % 2 for i in range(20)]), partition_by=["p"])
    map_columns(tmp_path / "t", {"id": "x", "x": "id", "p": "part"})
    rows = [{"x": i, "id": i * 0.5, "part": i % 2} for i in range(20)]
    table = open_table(tmp_path / "t")
    assert rows_read(table, ["x", "id", "part"]) == expected(rows, ["x", "id", "part"])
    assert rows_read(table, ["x"], filters=[("id", ">=", 5.0), ("part", "==", 1)]) == expected(
        [row for row in rows if row["id"] >= 5 and row["part"]], ["x"]
    )


def test_columns_are_found_by_the_ids_of_fields(tmp_path: Path) -> None:
    write(tmp_path / "t", numbers(0, 3))
    map_columns(tmp_path / "t", {"id": "number"}, mode="id")
    (path,) = live_adds(tmp_path / "t")
    fields = [
        pa.field(name, kind, metadata={"PARQUET:field_id": str(number)})
        for name, kind, number in (("col-7", pa.float64(), 2), ("col-8", pa.int64(), 1))
    ]
    pq.write_table(pa.table([[1.5, 2.5, 3.5], [7, 8, 9]], schema=pa.schema(fields)), tmp_path / "t" / path)
    rows = [{"number": 7 + i, "x": 1.5 + i} for i in range(3)]
    assert rows_read(open_table(tmp_path / "t"), ["number", "x"]) == expected(rows, ["number", "x"])


def test_features_that_are_not_supported_are_named(tmp_path: Path) -> None:
    write(tmp_path / "t", numbers(0, 3))
    commit(tmp_path / "t", protocol(tmp_path / "t", "someFutureFeature"))
    with pytest.raises(DataError, match="someFutureFeature"):
        open_table(tmp_path / "t")


def test_a_struct_with_mapped_fields_is_refused_when_it_is_read(tmp_path: Path) -> None:
    table = pa.table({"id": [1, 2], "s": pa.array([{"a": 1}, {"a": 2}])})
    write(tmp_path / "t", table)
    metadata = newest(tmp_path / "t", "metaData")
    schema = json.loads(metadata["schemaString"])
    for number, field in enumerate([*schema["fields"], *schema["fields"][1]["type"]["fields"]]):
        field["metadata"] = {"delta.columnMapping.id": number, "delta.columnMapping.physicalName": field["name"]}
    schema["fields"][1]["type"]["fields"][0]["name"] = "renamed"
    configuration = {"delta.columnMapping.mode": "name", "delta.columnMapping.maxColumnId": "3"}
    changed = {**metadata, "schemaString": json.dumps(schema), "configuration": configuration}
    commit(tmp_path / "t", protocol(tmp_path / "t", "columnMapping"), {"metaData": changed})
    opened = open_table(tmp_path / "t")
    assert ids(opened) == [1, 2]
    with pytest.raises(DataError, match="'s'.*other names in the files"):
        ParquetReader(opened, ["id", "s"], batch_size=1, decode={"s": lambda value: value["renamed"]})


def test_a_widened_type_is_read_as_the_new_one(tmp_path: Path) -> None:
    write(tmp_path / "t", pa.table({"id": pa.array([1, 2], pa.int32())}))
    metadata = newest(tmp_path / "t", "metaData")
    changed = {**metadata, "schemaString": metadata["schemaString"].replace('"integer"', '"long"')}
    commit(tmp_path / "t", protocol(tmp_path / "t", "typeWidening"), {"metaData": changed})
    table = open_table(tmp_path / "t")
    assert table.arrow_schema.field("id").type == pa.int64()
    assert ids(table) == [1, 2]


def test_bounds_of_a_column_that_was_widened_from_float_decide_nothing(tmp_path: Path) -> None:
    write(tmp_path / "t", pa.table({"id": [1, 2], "x": pa.array([0.1, 0.05], pa.float32())}))
    (add,) = live_adds(tmp_path / "t").values()
    bounds = {"minValues": {"x": 0.05}, "maxValues": {"x": 0.1}}  # as Spark writes them
    commit(tmp_path / "t", {"add": {**add, "stats": json.dumps({"numRecords": 2, **bounds, "nullCount": {"x": 0}})}})
    metadata = newest(tmp_path / "t", "metaData")
    schema = json.loads(metadata["schemaString"])
    changes = [{"fromType": "float", "toType": "double"}]
    schema["fields"][1] |= {"type": "double", "metadata": {"delta.typeChanges": changes}}
    changed = {**metadata, "schemaString": json.dumps(schema)}
    commit(tmp_path / "t", protocol(tmp_path / "t", "typeWidening"), {"metaData": changed})
    assert ids(tmp_path / "t", size=1, filters=[("x", ">", 0.1)]) == [1]


def test_a_vacuumed_version_says_which_file_is_gone(tmp_path: Path) -> None:
    write(tmp_path / "t", numbers(0, 10))
    old = open_table(tmp_path / "t")
    reader = ParquetReader(old, batch_size=2)
    write(tmp_path / "t", numbers(10, 20), mode="overwrite")
    table = deltalake.DeltaTable(str(tmp_path / "t"))
    (gone,) = table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    with pytest.raises(DataError, match=rf"version 0 of the Delta table.*{gone}") as raised:
        list(reader)
    assert "vacuumed" in str(raised.value)
    with pytest.raises(DataError, match=rf"version 0 of the Delta table.*{gone}"):
        ParquetReader(open_table(tmp_path / "t", version=0), batch_size=2)
    assert ids(open_table(tmp_path / "t")) == [*range(10, 20)]


def test_files_that_partitions_and_statistics_rule_out_are_not_opened(tmp_path: Path) -> None:
    write(tmp_path / "t", numbers(0, 30, p=[i // 10 for i in range(30)]), partition_by=["p"])
    write(tmp_path / "t", numbers(30, 40, p=[1] * 10), mode="append", partition_by=["p"])
    for path, add in live_adds(tmp_path / "t").items():
        low = json.loads(add["stats"])["minValues"]["id"]
        if add["partitionValues"]["p"] != "1" or low == 30:
            (tmp_path / "t" / path).unlink()
    wanted = [("p", "==", 1), ("id", "<", 30)]
    assert ids(open_table(tmp_path / "t"), filters=wanted) == [*range(10, 20)]


def test_commits_during_an_epoch_change_nothing(tmp_path: Path) -> None:
    write(tmp_path / "t", numbers(0, 100))
    table = open_table(tmp_path / "t")
    alone = [batch["id"].tolist() for batch in ParquetReader(table, batch_size=4, seed=3)]
    reader = ParquetReader(pickle.loads(pickle.dumps(table)), batch_size=4, seed=3)
    seen = []
    for batch in reader:
        seen.append(batch["id"].tolist())
        if len(seen) == 5:
            deltalake.DeltaTable(str(tmp_path / "t")).delete("id < 50")
            write(tmp_path / "t", numbers(100, 120), mode="append")
    assert seen == alone
    assert seen == [batch["id"].tolist() for batch in reader] or reader.position.epoch == 2


def test_a_position_belongs_to_its_version(tmp_path: Path) -> None:
    write(tmp_path / "t", numbers(0, 100))
    reader = ParquetReader(tmp_path / "t", batch_size=4)
    batches = iter(reader)
    for _ in range(5):
        next(batches)
    state = json.loads(json.dumps(reader.state_dict()))
    rest = [batch["id"].tolist() for batch in batches]
    write(tmp_path / "t", numbers(100, 101), mode="append")
    with pytest.raises(DataError, match=r"version 0.*version 1.*open_table\(table, version=\.\.\.\)"):
        ParquetReader(tmp_path / "t", batch_size=4).load_state_dict(state)
    again = ParquetReader(open_table(tmp_path / "t", version=0), batch_size=4)
    again.load_state_dict(state)
    assert [batch["id"].tolist() for batch in again] == rest


def test_copies_of_a_table_that_diverged_are_two_tables(tmp_path: Path) -> None:
    write(tmp_path / "t", numbers(0, 2, v=[0, 1]))
    shutil.copytree(tmp_path / "t", tmp_path / "u")
    keys = [open_table(tmp_path / name).snapshot.key for name in "tu"]
    assert keys[0] == keys[1] == open_table(tmp_path / "t").snapshot.key
    for name, begin in (("t", 10), ("u", 20)):
        write(tmp_path / name, numbers(begin, begin + 2, v=[0, 1]), mode="append")
        dataset = materialize(tmp_path / name, tmp_path / "store", columns=["id"], validation="v", reuse=True)
        assert ids(dataset) == [0, begin]
    reader = ParquetReader(tmp_path / "t", batch_size=1)
    next(iter(reader))
    with pytest.raises(DataError, match="version 1"):
        ParquetReader(tmp_path / "u", batch_size=1).load_state_dict(reader.state_dict())


def test_deleted_rows_and_columns_are_part_of_a_tables_identity(tmp_path: Path) -> None:
    write(tmp_path / "t", numbers(0, 9))
    (path,) = live_adds(tmp_path / "t")
    for name in "uvwx":
        shutil.copytree(tmp_path / "t", tmp_path / name)
    delete_rows(tmp_path / "t", path, [1, 2])
    delete_rows(tmp_path / "u", path, [1, 3])
    map_columns(tmp_path / "v", {})
    map_columns(tmp_path / "w", {"id": "x", "x": "id"})
    assert len({open_table(tmp_path / name).snapshot.key for name in "tuvw"}) == 4


def test_ranks_that_open_a_path_by_themselves_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "t", numbers(0, 10))
    with pytest.raises(DataError, match="open_table"):
        ParquetReader(tmp_path / "t", batch_size=2, rank=0, size=2)


def test_a_damaged_log_and_a_missing_library_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "t", numbers(0, 10))
    (path,) = live_adds(tmp_path / "t")
    pq.write_table(numbers(0, 9), tmp_path / "t" / path)
    with pytest.raises(DataError, match=r"holds 9 rows, but the log of version 0 .* says 10"):
        ParquetReader(tmp_path / "t", batch_size=2)
    delta_log.commit(tmp_path / "t", {"protocol": {"minReaderVersion": 9, "minWriterVersion": 9}})
    with pytest.raises(DataError, match="cannot open the Delta table|readers of version 9"):
        open_table(tmp_path / "t")
