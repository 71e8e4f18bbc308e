"""Whatever was done to a table, the rows of all ranks over an epoch are those of the version that is read.

Each history is drawn by hypothesis, carried out with the format's own library (what that cannot write, by hand from the
specification), and followed in plain dicts.
"""

from __future__ import annotations

import contextlib
import copy
import datetime as dt
import json
import shutil
import tempfile
import warnings
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import delta_log
import deltalake
import lance
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from iceberg_files import add_deletes, catalog_in, data_files, start_threads
from pyiceberg.types import LongType
from table_rows import NUM_HISTORIES, expected, rows_read

from hvd_cluster.data import open_table
from hvd_cluster.errors import DataError

Row = dict[str, Any]


class Mirror:
    """The rows that a table must hold, and those that it held at earlier versions."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.columns = ["id", "x", "k"]
        self.versions: dict[Any, tuple[list[Row], list[str]]] = {}
        self._next = 0

    def new(self, count: int) -> list[Row]:
        rows = [{name: (self._next + i) * (place + 1) for place, name in enumerate(self.columns)} for i in range(count)]
        for row in rows:
            row["k"] = row["id"] % 3
        self._next += count
        return rows

    def drop(self, ids: Collection[int]) -> None:
        self.rows = [row for row in self.rows if row["id"] not in ids]

    def ids_of(self, step: int, rest: int) -> set[int]:
        return {row["id"] for row in self.rows if row["id"] % step == rest}

    def remember(self, version: Any) -> None:
        self.versions[version] = (copy.deepcopy(self.rows), list(self.columns))

    def check(self, table: Any, **options: Any) -> None:
        """Compare what ranks read with the newest rows."""
        self.check_rows(table, self.rows, self.columns, **options)

    @staticmethod
    def check_rows(table: Any, rows: list[Row], columns: list[str], **options: Any) -> None:
        if rows:
            assert rows_read(table, columns, **options) == expected(rows, columns)
        else:
            with pytest.raises(DataError, match="no rows"):
                rows_read(table, columns, **options)


def arrow(rows: list[Row], columns: list[str]) -> pa.Table:
    return pa.table({name: pa.array([row.get(name) for row in rows], pa.int64()) for name in columns})


#: (what, numbers that say how much and which).
NUMBERS = st.tuples(st.integers(1, 12), st.integers(2, 4), st.integers(0, 3))


def histories(*names: str) -> Any:
    return st.lists(st.tuples(st.sampled_from(names), NUMBERS), min_size=1, max_size=7)


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="history-"))
    try:
        yield made
    finally:
        shutil.rmtree(made)


# --- Delta ----------------------------------------------------------------------------------------------------------


def run_delta(path: Path, history: list[tuple[str, tuple[int, int, int]]], ends: list[str]) -> Mirror:
    mirror = Mirror()
    url = str(path)

    def append(rows: list[Row], **options: Any) -> None:
        deltalake.write_deltalake(url, arrow(rows, mirror.columns), mode="append", **options)
        mirror.rows += rows

    append(mirror.new(5))
    for what, (count, step, rest) in history:
        table = deltalake.DeltaTable(url)
        partitions = table.metadata().partition_columns
        if what == "append":
            append(mirror.new(count))
        elif what == "delete":
            table.delete(f"id % {step} = {rest}")
            mirror.drop(mirror.ids_of(step, rest))
        elif what == "update":
            table.update(predicate=f"id % {step} = {rest}", updates={"x": "x + 1000"})
            for row in mirror.rows:
                row["x"] += 1000 if row["id"] % step == rest and row["x"] is not None else 0
        elif what == "merge":
            source = [{**row, "x": -row["id"]} for row in mirror.rows[:count]] + mirror.new(1)
            (
                table.merge(arrow(source, mirror.columns), "t.id = s.id", source_alias="s", target_alias="t")
                .when_matched_update_all()
                .when_not_matched_insert_all()
                .execute()
            )
            changed = {row["id"] for row in source}
            mirror.drop(changed)
            mirror.rows += source
        elif what == "add column" and len(mirror.columns) < 5:
            mirror.columns.append(f"c{len(mirror.columns)}")
            append(mirror.new(count), schema_mode="merge")
        elif what == "compact":
            table.optimize.compact()
        elif what == "partition" and mirror.rows:
            by = [] if partitions else ["k"]
            rows = arrow(mirror.rows, mirror.columns)
            deltalake.write_deltalake(url, rows, mode="overwrite", schema_mode="overwrite", partition_by=by)
        elif what == "concurrent":
            other = deltalake.DeltaTable(url)
            for writer in (table, other):
                rows = mirror.new(count)
                deltalake.write_deltalake(writer, arrow(rows, mirror.columns), mode="append")
                mirror.rows += rows
        elif what == "checkpoint":
            table.create_checkpoint()
        elif what == "vacuum":
            table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
            mirror.versions.clear()
        mirror.remember(deltalake.DeltaTable(url).version())
    for what in ends:  # deltalake may not write afterwards
        if what == "vectors":
            for name, add in delta_log.live_adds(path).items():
                known = [row["id"] for row in _rows_of(path, name)]
                rows = [number for number, row in enumerate(known) if row % 2]
                if rows and len(known) == json.loads(add["stats"])["numRecords"]:
                    delta_log.delete_rows(path, name, rows, inline=len(rows) < 3)
                    gone = {known[number] for number in rows}
                    mirror.drop(gone)
        elif what == "rename":
            swapped = {"id": "x", "x": "id"}
            delta_log.map_columns(path, swapped)
            mirror.columns = [swapped.get(name, name) for name in mirror.columns]
            mirror.rows = [{swapped.get(name, name): value for name, value in row.items()} for row in mirror.rows]
    return mirror


def _rows_of(path: Path, name: str) -> list[Row]:
    return pq.ParquetFile(path / unquote(name)).read(columns=["id"]).to_pylist()


DELTA = histories(
    "append", "delete", "update", "merge", "add column", "compact", "partition", "concurrent", "checkpoint", "vacuum"
)
DELTA_ENDS = st.sampled_from([[], ["vectors"], ["rename"], ["vectors", "rename"]])


def check_delta(history: Any, ends: Any, size: int, wanted: int) -> None:
    with folder() as path:
        mirror = run_delta(path / "t", history, ends)
        table = open_table(path / "t")
        mirror.check(table, size=size)
        key = mirror.columns[0]
        kept = [row for row in mirror.rows if row[key] is not None and row[key] > wanted]
        mirror.check_rows(table, kept, mirror.columns, filters=[(key, ">", wanted)])
        for version, (rows, columns) in mirror.versions.items():
            mirror.check_rows(open_table(path / "t", version=version), rows, columns)


SLOW = settings(max_examples=NUM_HISTORIES, deadline=None, suppress_health_check=list(HealthCheck))
FAST = settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
SIZES, WANTED = st.integers(1, 3), st.integers(0, 40)


@FAST
@given(history=DELTA, ends=DELTA_ENDS, size=SIZES, wanted=WANTED)
def test_a_few_delta_tables(history: Any, ends: Any, size: int, wanted: int) -> None:
    check_delta(history, ends, size, wanted)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@SLOW
@given(history=DELTA, ends=DELTA_ENDS, size=SIZES, wanted=WANTED)
def test_many_delta_tables(history: Any, ends: Any, size: int, wanted: int) -> None:
    check_delta(history, ends, size, wanted)


# --- Iceberg --------------------------------------------------------------------------------------------------------


def run_iceberg(catalog: Any, history: list[tuple[str, tuple[int, int, int]]]) -> tuple[Any, Mirror]:
    mirror = Mirror()
    first = mirror.new(5)
    table = catalog.create_table("db.t", arrow(first, mirror.columns).schema)
    names, has_equality = {"id": "id"}, False

    def append(to: Any, rows: list[Row]) -> None:
        to.append(arrow([{names.get(k, k): v for k, v in row.items()} for row in rows], to.schema().column_names))
        mirror.rows += rows

    append(table, first)
    for what, (count, step, rest) in history:
        table = catalog.load_table("db.t")
        key = names["id"]
        if has_equality and what in {"delete", "upsert", "compact"}:
            continue  # pyiceberg does not rewrite files that have equality deletes
        if what == "append":
            append(table, mirror.new(count))
        elif what == "delete":
            gone = sorted(row["id"] for row in mirror.rows if row["id"] % step == rest)
            if gone:
                table.delete(f"{key} in ({', '.join(map(str, gone))})")
                mirror.drop(mirror.ids_of(step, rest))
        elif what == "upsert":
            rows = [{**row, "x": -row["id"]} for row in mirror.rows[:count]]
            if rows:
                table.overwrite(
                    arrow([{names.get(k, k): v for k, v in row.items()} for row in rows], table.schema().column_names),
                    f"{key} in ({', '.join(str(row['id']) for row in rows)})",
                )
            changed = {row["id"] for row in rows}
            mirror.drop(changed)
            mirror.rows += rows
        elif what == "add column" and len(mirror.columns) < 5:
            mirror.columns.append(f"c{len(mirror.columns)}")
            with table.update_schema() as change:
                change.add_column(mirror.columns[-1], LongType())
        elif what == "rename":
            names["id"] = f"key{count}" if key == "id" else "id"
            with table.update_schema() as change:
                change.rename_column(key, names["id"])
        elif what == "reorder":
            with table.update_schema() as change:
                change.move_first("x")
        elif what == "partition":
            with table.update_spec() as change:
                if table.spec().fields:
                    change.remove_field(table.spec().fields[0].name)
                else:
                    change.add_identity("k")
        elif what == "compact" and mirror.rows:
            table.overwrite(table.scan().to_arrow())
        elif what == "concurrent":
            other = catalog.load_table("db.t")
            append(table, mirror.new(count))
            with contextlib.suppress(Exception):
                append(other, mirror.new(1))
        elif what == "positions" and not table.spec().fields:
            for path in list(data_files(table))[:2]:
                rows = _ids_of(path, table, key)
                gone = [(number, row) for number, row in enumerate(rows) if row % step == rest]
                if gone and not table.spec().fields:
                    places = {"file_path": [f"file://{path}"] * len(gone), "pos": [number for number, _ in gone]}
                    add_deletes(table, pa.table(places))
                    ids = {row for _, row in gone}
                    mirror.drop(ids)
        elif what == "equality" and not table.spec().fields:
            given = [rest, step, count + 5]
            add_deletes(table, pa.table({key: given}), equality=[key])
            has_equality = True
            mirror.drop(given)
        mirror.remember(catalog.load_table("db.t").current_snapshot().snapshot_id)
    return catalog.load_table("db.t"), mirror


def _ids_of(path: Path, table: Any, key: str) -> list[int]:
    number = str(table.schema().find_field(key).field_id).encode()
    file = pq.ParquetFile(path)
    name = next(one.name for one in file.schema_arrow if one.metadata[b"PARQUET:field_id"] == number)
    return file.read(columns=[name]).column(name).to_pylist()


ICEBERG = histories(
    "append",
    "delete",
    "upsert",
    "add column",
    "rename",
    "reorder",
    "partition",
    "compact",
    "concurrent",
    "positions",
    "equality",
)


def check_iceberg(history: Any, size: int, wanted: int) -> None:
    with folder() as path, catalog_in(path) as catalog, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded, mirror = run_iceberg(catalog, history)
        key = next(name for name in loaded.schema().column_names if name == "id" or name.startswith("key"))
        rows = [{key if name == "id" else name: value for name, value in row.items()} for row in mirror.rows]
        columns = [key if name == "id" else name for name in mirror.columns]
        table = open_table(loaded)
        mirror.check_rows(table, rows, columns, size=size)
        mirror.check_rows(table, [row for row in rows if row[key] > wanted], columns, filters=[(key, ">", wanted)])
        for version, (kept, _) in mirror.versions.items():
            mirror.check_rows(open_table(loaded, version=version), kept, ["x", "k"])


@pytest.fixture(scope="module", autouse=True)
def threads() -> None:
    start_threads()


@FAST
@given(history=ICEBERG, size=SIZES, wanted=WANTED)
def test_a_few_iceberg_tables(history: Any, size: int, wanted: int) -> None:
    check_iceberg(history, size, wanted)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@SLOW
@given(history=ICEBERG, size=SIZES, wanted=WANTED)
def test_many_iceberg_tables(history: Any, size: int, wanted: int) -> None:
    check_iceberg(history, size, wanted)


# --- Lance ----------------------------------------------------------------------------------------------------------


def run_lance(url: str, history: list[tuple[str, tuple[int, int, int]]]) -> Mirror:
    mirror = Mirror()
    mirror.rows = mirror.new(5)
    lance.write_dataset(arrow(mirror.rows, mirror.columns), url)
    for what, (count, step, rest) in history:
        table = lance.dataset(url)
        if what == "append":
            rows = mirror.new(count)
            lance.write_dataset(arrow(rows, table.schema.names), url, mode="append", max_rows_per_file=step)
            mirror.rows += rows
        elif what == "delete":
            table.delete(f"id % {step} = {rest}")
            mirror.drop(mirror.ids_of(step, rest))
        elif what == "update":
            table.update({"x": "x + 1000"}, where=f"id % {step} = {rest}")
            for row in mirror.rows:
                row["x"] += 1000 if row["id"] % step == rest else 0
        elif what == "merge":
            source = [{**row, "x": -row["id"]} for row in mirror.rows[:count]] + mirror.new(1)
            merge = table.merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
            merge.execute(arrow(source, table.schema.names))
            changed = {row["id"] for row in source}
            mirror.drop(changed)
            mirror.rows += source
        elif what == "add column" and len(mirror.columns) < 5:
            name = f"c{len(mirror.columns)}"
            table.add_columns({name: "id * 7"})
            mirror.columns.append(name)
            for row in mirror.rows:
                row[name] = 7 * row["id"]
        elif what == "compact":
            table.optimize.compact_files()
        elif what == "concurrent":
            other = lance.dataset(url)
            for writer in (table, other):
                rows = mirror.new(count)
                lance.write_dataset(arrow(rows, table.schema.names), writer, mode="append")
                mirror.rows += rows
        elif what == "clean up":
            table.cleanup_old_versions(older_than=dt.timedelta(0), delete_unverified=True)
            mirror.versions.clear()
        mirror.remember(lance.dataset(url).version)
    return mirror


LANCE = histories("append", "delete", "update", "merge", "add column", "compact", "concurrent", "clean up")


def check_lance(history: Any, size: int, wanted: int) -> None:
    with folder() as path:
        mirror = run_lance(str(path / "t"), history)
        table = open_table(path / "t")
        mirror.check(table, size=size)
        kept = [row for row in mirror.rows if row["id"] > wanted]
        mirror.check_rows(table, kept, mirror.columns, filters=[("id", ">", wanted)])
        for version, (rows, columns) in mirror.versions.items():
            mirror.check_rows(open_table(path / "t", version=version), rows, columns)


@FAST
@given(history=LANCE, size=SIZES, wanted=WANTED)
def test_a_few_lance_tables(history: Any, size: int, wanted: int) -> None:
    check_lance(history, size, wanted)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@SLOW
@given(history=LANCE, size=SIZES, wanted=WANTED)
def test_many_lance_tables(history: Any, size: int, wanted: int) -> None:
    check_lance(history, size, wanted)
