"""Iceberg tables are read exactly: the live rows of one snapshot, or a refusal that names what is not supported."""

from __future__ import annotations

import datetime as dt
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from iceberg_files import add_deletes, add_vector, as_version_3, catalog_in, data_files, file_of, start_threads
from pyiceberg.manifest import DataFileContent, FileFormat
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import IdentityTransform
from pyiceberg.typedef import Record
from pyiceberg.types import DateType, DoubleType, LongType, NestedField, UUIDType
from table_rows import expected, rows_read

from hvd_cluster.data import ParquetReader, open_table
from hvd_cluster.data.cache import DiskCache, MemoryCache
from hvd_cluster.data.reading.table_columns import TableColumns
from hvd_cluster.errors import DataError


@pytest.fixture(scope="module", autouse=True)
def threads() -> None:
    start_threads()


@pytest.fixture
def catalog(tmp_path: Path) -> Any:
    with catalog_in(tmp_path) as found:
        yield found


def numbers(begin: int, stop: int, **columns: Any) -> pa.Table:
    ids = np.arange(begin, stop)
    return pa.table({"id": ids, "x": ids * 0.5, **columns})


def made(catalog: Any, *parts: pa.Table, **options: Any) -> Any:
    table = catalog.create_table("db.t", options.pop("schema", parts[0].schema if parts else None), **options)
    for part in parts:
        table.append(part)
    return table


def ids(table: Any, **options: Any) -> list[int]:
    return sorted(int(row[0]) for row in rows_read(table, ["id"], **options).elements())


def test_removed_files_and_earlier_snapshots(catalog: Any) -> None:
    table = made(catalog, numbers(0, 100))
    first = table.current_snapshot().snapshot_id
    time.sleep(0.05)
    between = dt.datetime.now(dt.timezone.utc)
    time.sleep(0.05)
    table.append(numbers(100, 150))
    table.delete("id < 30")
    assert ids(table) == [*range(30, 150)]
    assert ids(open_table(table, version=first)) == [*range(100)]
    assert ids(open_table(table, version=str(first))) == [*range(100)]
    assert ids(open_table(table, as_of=between)) == [*range(100)]
    table.manage_snapshots().create_tag(first, "golden").commit()
    assert ids(open_table(table, version="golden")) == [*range(100)]
    with pytest.raises(DataError, match=f"no snapshot 5: .*{first}"):
        open_table(table, version=5)
    loaded = catalog.load_table("db.t")
    table.append(numbers(150, 160))
    assert ids(loaded) == [*range(30, 150)]


def test_a_tag_of_digits_comes_before_the_number(catalog: Any) -> None:
    table = made(catalog, numbers(0, 10), numbers(10, 20))
    first, second = (one.snapshot_id for one in table.metadata.snapshots)
    table.manage_snapshots().create_tag(first, "20240501").create_tag(first, str(second)).commit()
    assert ids(open_table(table, version="20240501")) == ids(open_table(table, version=str(second))) == [*range(10)]
    assert ids(open_table(table, version=second)) == [*range(20)]


def test_a_version_names_the_schema_if_that_is_newer_than_the_snapshot(catalog: Any) -> None:
    table = made(catalog, numbers(0, 10))
    first = table.current_snapshot().snapshot_id
    table.manage_snapshots().create_branch(first, "dev").create_tag(first, "golden").commit()
    with table.update_schema() as change:
        change.rename_column("x", "y")
    opened = open_table(table)
    assert opened.snapshot.version == f"{first}@schema1"
    for branch in ("main", "dev"):
        assert open_table(table, version=branch).arrow_schema.names == ["id", "y"]
    for past in (first, str(first), "golden"):
        assert open_table(table, version=past).arrow_schema.names == ["id", "x"]
    reader = ParquetReader(opened, batch_size=2)
    batches = iter(reader)
    next(batches)
    state = reader.state_dict()
    rest = [batch["y"].tolist() for batch in batches]
    table.append(pa.table({"id": [10], "y": [5.0]}))
    assert open_table(table).snapshot.version == str(table.current_snapshot().snapshot_id)
    with pytest.raises(DataError, match=f"version {first}@schema1'"):
        ParquetReader(open_table(table), batch_size=2).load_state_dict(state)
    again = ParquetReader(open_table(table, version=f"{first}@schema1"), batch_size=2)
    again.load_state_dict(state)
    assert [batch["y"].tolist() for batch in again] == rest
    with pytest.raises(DataError, match=r"no schema 7: its schemas are \[0, 1\]"):
        open_table(table, version=f"{first}@schema7")


def test_a_folder_is_opened_where_it_says_which_metadata_is_current(catalog: Any) -> None:
    table = made(catalog, numbers(0, 10))
    folder = Path(table.location().removeprefix("file://"))
    assert ids(open_table(table.metadata_location)) == [*range(10)]
    with pytest.raises(DataError, match=r"only its catalog knows.*catalog\.load_table"):
        open_table(folder)
    (folder / "metadata" / "version-hint.text").write_text(Path(table.metadata_location).name)
    assert ids(open_table(folder)) == [*range(10)]
    with pytest.raises(DataError, match="belongs to the Iceberg table"):
        open_table(next((folder / "data").glob("*.parquet")))


def test_renamed_swapped_added_and_reordered_columns(catalog: Any) -> None:
    table = made(catalog, numbers(0, 10))
    with table.update_schema() as change:
        change.rename_column("id", "y")
        change.rename_column("x", "id")
        change.add_column("new", LongType())
        change.move_first("new")
    table.append(pa.table({"new": [7, 8], "y": [10, 11], "id": [0.25, 0.5]}))
    rows = [{"y": i, "id": i * 0.5} for i in range(10)]
    rows += [{"y": 10, "id": 0.25, "new": 7}, {"y": 11, "id": 0.5, "new": 8}]
    assert open_table(table).arrow_schema.names == ["new", "y", "id"]
    assert rows_read(table, ["y", "id", "new"]) == expected(rows, ["y", "id", "new"])
    with table.update_schema() as change:
        change.delete_column("new")
    with table.update_schema() as change:
        change.add_column("new", LongType())  # another column, in spite of its name
    rows = [{**row, "new": None} for row in rows]
    assert rows_read(table, ["y", "id", "new"]) == expected(rows, ["y", "id", "new"])


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_a_cache_keeps_no_column_that_was_dropped_for_one_of_its_name(catalog: Any, tmp_path: Path, kind: str) -> None:
    table = made(catalog, numbers(10, 12))
    options: dict[str, Any] = {"batch_size": 2, "shuffle": False, "fill_nulls": {"x": -1.0}}
    options["cache"] = MemoryCache(1 << 20) if kind == "memory" else DiskCache(tmp_path / "cache", 1 << 20)
    assert next(iter(ParquetReader(table, ["x"], **options)))["x"].tolist() == [5.0, 5.5]
    with table.update_schema(allow_incompatible_changes=True) as change:
        change.delete_column("x")
    with table.update_schema() as change:
        change.add_column("x", DoubleType())
    assert next(iter(ParquetReader(table, ["x"], **options)))["x"].tolist() == [-1.0, -1.0]


def test_an_added_column_has_its_default_in_older_files(catalog: Any) -> None:
    table = made(catalog, numbers(0, 5))
    with table.update_schema() as change:
        change.add_column("new", LongType())

    def default(metadata: dict[str, Any]) -> None:
        metadata["schemas"][-1]["fields"][-1]["initial-default"] = 42

    table = as_version_3(table, default)
    assert rows_read(table, ["id", "new"]) == expected([{"id": i, "new": 42} for i in range(5)], ["id", "new"])


def test_a_widened_type_is_read_as_the_new_one(catalog: Any) -> None:
    table = made(catalog, pa.table({"id": pa.array([1, 2], pa.int32()), "f": pa.array([0.5, 1.5], pa.float32())}))
    with table.update_schema() as change:
        change.update_column("id", LongType())
        change.update_column("f", DoubleType())
    table.append(pa.table({"id": [1 << 40], "f": [0.1]}))
    rows = [{"id": 1, "f": 0.5}, {"id": 2, "f": 1.5}, {"id": 1 << 40, "f": 0.1}]
    assert rows_read(table, ["id", "f"]) == expected(rows, ["id", "f"])
    assert ids(table, filters=[("id", ">", 1)]) == [2, 1 << 40]


def test_partitions_may_change_and_rule_out_files(catalog: Any) -> None:
    table = made(catalog, numbers(0, 30, k=[i // 10 for i in range(30)]))
    with table.update_spec() as change:
        change.add_identity("k")
    table.append(numbers(30, 60, k=[i // 10 for i in range(30, 60)]))
    with table.update_spec() as change:
        change.remove_field("k")
        change.add_identity("id")
    table.append(numbers(60, 80, k=[9] * 20))
    assert ids(table) == [*range(80)]
    for path, file in data_files(table).items():
        if file.lower_bounds and file.spec_id == 1 and file.partition[0] != 4:
            path.unlink()
    assert ids(table, filters=[("k", "==", 4)]) == [*range(40, 50)]


def test_position_deletes_of_older_files_only(catalog: Any) -> None:
    table = made(catalog, numbers(0, 100), numbers(100, 200))
    first, second = data_files(table)
    add_deletes(table, pa.table({"file_path": [f"file://{first}"] * 3, "pos": [0, 5, 99]}))
    add_deletes(table, pa.table({"file_path": [f"file://{second}", f"file://{first}"], "pos": [7, 5]}))
    assert len(ids(table)) == 196
    assert ids(table) == sorted(table.scan().to_arrow().column("id").to_pylist())


def test_equality_deletes_of_older_files_only(catalog: Any) -> None:
    table = made(catalog, numbers(0, 20), pa.table({"id": [3, 50], "x": [None, 2.0]}))
    add_deletes(table, pa.table({"id": [3, 4, 60]}), equality=["id"])
    add_deletes(table, pa.table({"id": [5, 6, 50], "x": [2.5, 0.0, None]}), equality=["id", "x"])
    table.append(pa.table({"id": [4, 60], "x": [1.0, 1.0]}))
    assert ids(table) == [0, 1, 2, 4, *range(6, 20), 50, 60]
    with table.update_schema() as change:
        change.rename_column("id", "key")
    assert len(rows_read(table, ["key"])) == 20


def test_equality_deletes_match_nulls_and_stay_in_their_partition(catalog: Any) -> None:
    schema = Schema(
        NestedField(1, "id", LongType()), NestedField(2, "x", DoubleType()), NestedField(3, "k", LongType())
    )
    spec = PartitionSpec(PartitionField(3, 1000, IdentityTransform(), "k"))
    table = made(catalog, schema=schema, partition_spec=spec)
    table.append(pa.table({"id": [1, 2, 3, 4], "x": [None, 1.0, None, float("nan")], "k": [0, 0, 1, 1]}))
    add_deletes(table, pa.table({"x": pa.array([None], pa.float64())}), equality=["x"], partition=[0])
    assert ids(table) == [2, 3, 4]


def test_equality_deletes_of_a_spec_without_any_field_left_apply_everywhere(catalog: Any) -> None:
    schema = Schema(NestedField(1, "id", LongType()), NestedField(2, "k", LongType()))
    spec = PartitionSpec(PartitionField(2, 1000, IdentityTransform(), "k"))
    table = made(catalog, schema=schema, partition_spec=spec, properties={"format-version": "1"})
    table.append(pa.table({"id": [1, 2, 3, 4], "k": [0, 0, 1, 1]}))
    with table.update_spec() as change:
        change.remove_field("k")  # version 1 keeps it, with the transform "void"
    with table.transaction() as transaction:
        transaction.upgrade_table_version(2)
    assert [str(one.transform) for one in table.spec().fields] == ["void"]
    add_deletes(table, pa.table({"id": [1, 3]}), equality=["id"], partition=[None])
    assert ids(table) == [2, 4]
    assert ids(table, filters=[("k", "==", 1)]) == [4]


def test_equality_deletes_apply_to_a_partition_of_nans(catalog: Any) -> None:
    schema = Schema(NestedField(1, "id", LongType()), NestedField(2, "x", DoubleType()))
    table = made(catalog, pa.table({"id": [1, 2], "x": [math.nan, math.nan]}), schema=schema)
    with table.update_spec() as change:
        change.add_identity("x")
    add_deletes(table, pa.table({"id": [1]}), equality=["id"], partition=[math.nan])
    (path,) = data_files(table)
    given = {"content": DataFileContent.DATA, "file_format": FileFormat.PARQUET, "partition": Record(math.nan)}
    with table.transaction() as transaction, transaction.update_snapshot().overwrite() as change:
        change.delete_data_file(next(iter(data_files(table).values())))
        change.append_data_file(file_of(path, 2, spec_id=table.spec().spec_id, **given))
    assert ids(table) == [1, 2]
    add_deletes(table, pa.table({"id": [1]}), equality=["id"], partition=[math.nan])
    assert ids(table) == [2]


def test_equality_deletes_on_fields_of_structs(catalog: Any) -> None:
    structs = [{"a": 1, "b": {"c": "p"}}, {"a": 2, "b": None}, None, {"a": 3, "b": {"c": "q"}}]
    table = made(catalog, pa.table({"id": [1, 2, 3, 4], "s": structs}))
    add_deletes(table, pa.table({"s": [structs[3]]}), equality=["s.b.c"])
    assert ids(table) == [1, 2, 3]
    add_deletes(table, pa.table({"s": [{"a": 1, "b": {"c": "q"}}]}), equality=["s.a"])
    table.append(pa.table({"id": [5], "s": [structs[0]]}))
    assert ids(table) == [2, 3, 5]
    add_deletes(table, pa.table({"s": structs[1:2]}), equality=["s.b.c"])  # the null of a struct that is null
    assert ids(table) == [5]


def test_a_delete_file_without_the_column_that_it_deletes_by_is_refused(catalog: Any) -> None:
    table = made(catalog, numbers(0, 10))
    add_deletes(table, pa.table({"x": [0.5]}), equality=["id"])
    with pytest.raises(DataError, match="deletes rows by 'id', which it does not hold"):
        ids(table)


def test_equality_deletes_on_uuids(catalog: Any) -> None:
    table = made(catalog, schema=Schema(NestedField(1, "id", LongType()), NestedField(2, "key", UUIDType())))
    keys = pa.array([bytes([i] * 16) for i in range(3)] + [None], pa.binary(16))
    table.append(pa.table({"id": [0, 1, 2, 3], "key": keys}).cast(table.schema().as_arrow()))
    add_deletes(table, pa.table({"key": keys.take([1, 3])}), equality=["key"])
    assert ids(table) == [0, 2]


def test_deletion_vectors_take_the_place_of_position_deletes(catalog: Any) -> None:
    table = made(catalog, numbers(0, 100), numbers(100, 120))
    (first, second) = data_files(table)
    add_deletes(table, pa.table({"file_path": [f"file://{first}"] * 2, "pos": [1, 50]}))
    table = add_vector(table, {first: [0, 1, 50], second: [3]})
    live = ids(table)
    assert len(live) == 116
    assert live == sorted(table.scan().to_arrow().column("id").to_pylist())


def test_what_is_not_supported_is_named(catalog: Any, tmp_path: Path) -> None:
    table = made(catalog, numbers(0, 10))
    add_deletes(table, pa.table({"id": [1]}), equality=["id"], file_format="AVRO")
    with pytest.raises(DataError, match="delete files in AVRO"):
        open_table(table)
    with pytest.raises(DataError, match="no rows yet"):
        open_table(catalog.create_table("db.empty", numbers(0, 1).schema))


def test_nested_fields_that_were_renamed_are_refused_when_they_are_read(catalog: Any) -> None:
    table = made(catalog, pa.table({"id": [1, 2], "s": pa.array([{"a": 1}, {"a": 2}])}))
    with table.update_schema() as change:
        change.rename_column("s.a", "b")
    assert ids(table) == [1, 2]
    with pytest.raises(DataError, match="'s'.*other names"):
        ParquetReader(table, ["id", "s"], batch_size=1, decode={"s": lambda value: value["b"]})


def structs(table: Any) -> list[Any]:
    """The values of the column "s", as Python has them."""
    chosen = TableColumns(open_table(table), ["s"], raw=["s"])
    return [value for group in chosen.row_groups for value in chosen.read(group, ["s"]).column("s").to_pylist()]


def test_fields_that_were_added_inside_of_structs_are_null_in_older_files(catalog: Any) -> None:
    values = [{"a": 1, "in": [{"b": 2}]}, None]
    table = made(catalog, pa.table({"id": [1, 2], "s": values}))
    with table.update_schema() as change:
        change.add_column(("s", "new"), LongType())
        change.add_column(("s", "in", "element", "new"), LongType())
        change.move_first(("s", "new"))
    newer = {"new": 3, "a": 4, "in": [{"b": 5, "new": 6}]}
    table.append(pa.Table.from_pylist([{"id": 3, "s": newer}], table.schema().as_arrow()))
    assert structs(table) == [{"new": None, "a": 1, "in": [{"b": 2, "new": None}]}, None, newer]


def test_fields_inside_of_structs_that_are_others_of_their_name_or_have_defaults_are_refused(catalog: Any) -> None:
    table = made(catalog, pa.table({"id": [1], "s": pa.array([{"a": 1, "b": 2}])}))
    with table.update_schema(allow_incompatible_changes=True) as change:
        change.delete_column("s.a")
    assert structs(table) == [{"b": 2}]
    with table.update_schema() as change:
        change.add_column(("s", "new"), LongType())

    def default(metadata: dict[str, Any]) -> None:
        metadata["schemas"][-1]["fields"][1]["type"]["fields"][-1]["initial-default"] = 42

    assert structs(table) == [{"b": 2, "new": None}]
    with pytest.raises(DataError, match="'s'.*other names or defaults"):
        structs(as_version_3(table, default))
    with table.update_schema() as change:
        change.add_column(("s", "a"), LongType())
    with pytest.raises(DataError, match="'s'.*other names or defaults"):
        structs(table)


def test_expired_snapshots_say_what_is_gone(catalog: Any) -> None:
    table = made(catalog, numbers(0, 10))
    old = open_table(table)
    reader = ParquetReader(old, batch_size=2)
    (gone,) = data_files(table)
    gone.unlink()
    with pytest.raises(DataError, match=rf"version \d+ of the Iceberg table.*{gone.name}"):
        list(reader)
    with pytest.raises(DataError, match=rf"version \d+ of the Iceberg table.*{gone.name}"):
        ParquetReader(table, batch_size=2)


def test_days_as_partitions_have_their_type(catalog: Any) -> None:
    schema = Schema(NestedField(1, "id", LongType()), NestedField(2, "day", DateType()))
    spec = PartitionSpec(PartitionField(2, 1000, IdentityTransform(), "day"))
    table = made(catalog, schema=schema, partition_spec=spec)
    days = [dt.date(2024, 2, 29), dt.date(1969, 12, 31), None]
    table.append(pa.table({"id": [1, 2, 3], "day": pa.array(days, pa.date32())}))
    for path in data_files(table):  # as imported files are, which leave partition columns to the names of folders
        pq.write_table(pq.read_table(path, partitioning=None).select(["id"]), path)
    rows = [{"id": 1, "day": 19782}, {"id": 2, "day": -1}, {"id": 3, "day": 1}]
    fill = {"day": dt.date(1970, 1, 2)}
    assert rows_read(table, ["id", "day"], fill_nulls=fill) == expected(rows, ["id", "day"])
