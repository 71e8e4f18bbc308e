"""Whatever was done to a table, the rows of all ranks over an epoch are those of the version that is read.

Each history is drawn by hypothesis, carried out with the format's own library (what that cannot write, by hand from the
specification), and followed in plain dicts.
"""

from __future__ import annotations

import contextlib
import copy
import datetime as dt
import shutil
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import delta_log
import deltalake
import lance
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake.exceptions import CommitFailedError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from iceberg_files import add_deletes, as_version_3, catalog_in, data_files, start_threads
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.types import LongType
from table_rows import NUM_HISTORIES, expected, rows_read

from hvd_cluster.data import open_table
from hvd_cluster.data.reading.table_columns import TableColumns
from hvd_cluster.errors import DataError

Row = dict[str, Any]
DAY = dt.date(2024, 1, 1)
#: Columns that are not int64.
TYPES = {"s": pa.string(), "d": pa.date32(), "m": pa.decimal128(9, 2)}


class Mirror:
    """The rows that a table must hold, and those that it held at earlier versions."""

    def __init__(self) -> None:
        #: By the names that the columns had first, as everything here but ``names``.
        self.rows: list[Row] = []
        self.columns = ["id", "x", "k", "s", "d", "m"]
        #: Column -> its present name.
        self.names = {name: name for name in self.columns}
        self.versions: dict[Any, tuple[list[Row], dict[str, str]]] = {}
        self._next = 0

    def new(self, count: int) -> list[Row]:
        rows = []
        for number in range(self._next, self._next + count):
            row = {name: number * (place + 1) for place, name in enumerate(self.columns)}
            row |= {
                "id": number,
                "k": number % 3,
                "s": None if number % 5 == 0 else f"s{number % 4}",
                "d": None if number % 6 == 1 else DAY + dt.timedelta(days=number % 8),
                "m": None if number % 7 == 2 else Decimal(number % 9) / 4,
            }
            if number % 7 == 3:
                row["x"] = None
            rows.append({name: row[name] for name in self.columns})
        self._next += count
        return rows

    def drop(self, ids: Collection[int]) -> None:
        self.rows = [row for row in self.rows if row["id"] not in ids]

    def ids_of(self, step: int, rest: int) -> set[int]:
        return {row["id"] for row in self.rows if row["id"] % step == rest}

    def add_column(self) -> str:
        name = f"c{len(self.columns)}"
        self.columns.append(name)
        self.names[name] = name
        return name

    def rename(self, count: int) -> tuple[str, str]:
        """The present and the new name of a column."""
        name = ["id", "x", "s", "d"][count % 4]
        before = self.names[name]
        self.names[name] = name if before != name else f"{name}_{count}"
        return before, self.names[name]

    def arrow(self, rows: list[Row], names: Sequence[str] | None = None) -> pa.Table:
        """Rows under the present names of their columns."""
        columns = {
            self.names[name]: pa.array([row.get(name) for row in rows], TYPES.get(name, pa.int64()))
            for name in self.columns
        }
        return pa.table(columns).select(list(names or columns))

    def remember(self, version: Any) -> None:
        if version not in self.versions:
            self.versions[version] = (copy.deepcopy(self.rows), dict(self.names))

    def check(self, table: Any, size: int, wanted: int) -> None:
        """Compare what is read with the newest rows, and with those that meet a condition."""
        check_rows(table, self.rows, self.names, size=size)
        day, amount = DAY + dt.timedelta(days=wanted % 8), Decimal(wanted % 9) / 4
        conditions: list[tuple[str, str, Any, Callable[[Any], bool]]] = [
            ("id", ">", wanted, lambda value: value > wanted),
            ("s", "==", f"s{wanted % 4}", lambda value: value == f"s{wanted % 4}"),
            ("d", ">=", day, lambda value: value >= day),
            ("m", "<", amount, lambda value: value < amount),
        ]
        name, op, bound, matches = conditions[wanted % 4]
        kept = [row for row in self.rows if row.get(name) is not None and matches(row[name])]
        check_rows(table, kept, self.names, filters=[(self.names[name], op, bound)])

    def check_versions(self, source: Any) -> None:
        for version, (rows, names) in self.versions.items():
            check_rows(open_table(source, version=version), rows, names)


def check_rows(table: Any, rows: list[Row], names: dict[str, str], **options: Any) -> None:
    """Compare what the ranks read of numbers and, without a filter, the stored values of all columns, with rows."""
    named = [{names[name]: row.get(name) for name in names} for row in rows]
    numbers = [shown for name, shown in names.items() if name not in TYPES]
    if not rows:
        with pytest.raises(DataError, match="no rows"):
            rows_read(table, numbers, **options)
        return
    assert rows_read(table, numbers, **options) == expected(named, numbers)
    if "filters" not in options:
        columns = list(names.values())
        chosen = TableColumns(table, columns, raw=columns)
        stored = [row for group in chosen.row_groups for row in chosen.read(group, columns).select(columns).to_pylist()]
        assert values_of(stored, columns) == values_of(named, columns)


def values_of(rows: list[Row], columns: Sequence[str]) -> Counter[tuple[Any, ...]]:
    return Counter(tuple(row[name] for name in columns) for row in rows)


def at_once(*writers: Callable[[], None]) -> None:
    """Let each of them write in a thread of its own, and raise what they raise."""
    barrier, errors = threading.Barrier(len(writers)), []

    def write(writer: Callable[[], None]) -> None:
        try:
            barrier.wait()
            writer()
        except BaseException as error:  # noqa: BLE001  raised again below
            errors.append(error)

    threads = [threading.Thread(target=write, args=(writer,)) for writer in writers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error


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


def run_delta(path: Path, history: list[tuple[str, tuple[int, int, int]]]) -> Mirror:
    mirror = Mirror()
    url = str(path)
    by_hand, deleted = False, dict[str, set[int]]()

    def append(rows: list[Row], **options: Any) -> None:
        if by_hand:
            stored = pa.table(mirror.arrow(rows).columns, names=mirror.columns)
            first = {now: name for name, now in mirror.names.items()}
            delta_log.append(path, stored, [first[name] for name in by])
        else:
            deltalake.write_deltalake(url, mirror.arrow(rows), mode="append", **options)
        mirror.rows += rows

    by: list[str] = []
    append(mirror.new(5))
    for what, (count, step, rest) in history:
        table = deltalake.DeltaTable(url)
        by = table.metadata().partition_columns
        if what == "append":
            append(mirror.new(count))
        elif what == "vectors" or (what == "delete" and by_hand):
            by_hand = True  # deltalake does not write to tables with features that it does not know
            for name in delta_log.live_adds(path):
                rows = {number for number, row in enumerate(_ids_in(path / name)) if row % step == rest}
                if rows - deleted.setdefault(name, set()):
                    deleted[name] |= rows
                    delta_log.delete_rows(path, name, deleted[name], inline=len(rows) < 3)
            mirror.drop(mirror.ids_of(step, rest))
        elif what == "rename":
            by_hand = True
            before, after = mirror.rename(count)
            delta_log.map_columns(path, {before: after})
        elif what == "add column" and len(mirror.columns) < 8:
            if by_hand:
                delta_log.add_column(path, mirror.add_column())
            else:
                mirror.add_column()
                append(mirror.new(count), schema_mode="merge")
        elif by_hand:
            pass
        elif what == "delete":
            table.delete(f"id % {step} = {rest}")
            mirror.drop(mirror.ids_of(step, rest))
        elif what == "update":
            table.update(predicate=f"id % {step} = {rest}", updates={"x": "x + 1000"})
            for row in mirror.rows:
                row["x"] = row["x"] + 1000 if row["id"] % step == rest and row["x"] is not None else row["x"]
        elif what == "merge":
            source = [{**row, "x": -row["id"], "s": None} for row in mirror.rows[:count]] + mirror.new(1)
            (
                table.merge(mirror.arrow(source), "t.id = s.id", source_alias="s", target_alias="t")
                .when_matched_update_all()
                .when_not_matched_insert_all()
                .execute()
            )
            mirror.drop({row["id"] for row in source})
            mirror.rows += source
        elif what == "compact":
            table.optimize.compact()
        elif what == "partition" and mirror.rows:
            new = [] if by else [["k", "s", "d", "m"][rest]]
            rows_now = mirror.arrow(mirror.rows)
            deltalake.write_deltalake(url, rows_now, mode="overwrite", schema_mode="overwrite", partition_by=new)
        elif what == "concurrent":
            delta_at_once(table, deltalake.DeltaTable(url), mirror, count, step, rest)
        elif what == "checkpoint":
            table.create_checkpoint()
        elif what == "vacuum":
            table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
            mirror.versions.clear()
        mirror.remember(deltalake.DeltaTable(url).version())
    return mirror


def delta_at_once(one: Any, other: Any, mirror: Mirror, count: int, step: int, rest: int) -> None:
    """One handle appends while the other deletes earlier rows, or appends too."""
    rows, more, gone = mirror.new(count), mirror.new(1), mirror.ids_of(step, rest)

    def append(handle: Any, added: list[Row]) -> None:
        deltalake.write_deltalake(handle, mirror.arrow(added), mode="append")
        mirror.rows += added

    def delete() -> None:
        with contextlib.suppress(CommitFailedError):  # the other was first
            other.delete(f"id in ({', '.join(map(str, sorted(gone)))})")
            done.append(True)

    done: list[bool] = []
    at_once(lambda: append(one, rows), delete if gone and count % 2 else lambda: append(other, more))
    if done:
        mirror.drop(gone)


def _ids_in(path: Path) -> list[int]:
    return pq.ParquetFile(path).read(columns=["id"]).column("id").to_pylist()


DELTA = histories(
    "append",
    "delete",
    "update",
    "merge",
    "add column",
    "compact",
    "partition",
    "concurrent",
    "checkpoint",
    "vacuum",
    "vectors",
    "rename",
)


def check_delta(history: Any, size: int, wanted: int) -> None:
    with folder() as path:
        mirror = run_delta(path / "t", history)
        mirror.check(open_table(path / "t"), size, wanted)
        mirror.check_versions(path / "t")


SLOW = settings(max_examples=NUM_HISTORIES, deadline=None, suppress_health_check=list(HealthCheck))
FAST = settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
SIZES, WANTED = st.integers(1, 3), st.integers(0, 40)


@FAST
@given(history=DELTA, size=SIZES, wanted=WANTED)
def test_a_few_delta_tables(history: Any, size: int, wanted: int) -> None:
    check_delta(history, size, wanted)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@SLOW
@given(history=DELTA, size=SIZES, wanted=WANTED)
def test_many_delta_tables(history: Any, size: int, wanted: int) -> None:
    check_delta(history, size, wanted)


# --- Iceberg --------------------------------------------------------------------------------------------------------


def run_iceberg(catalog: Any, history: list[tuple[str, tuple[int, int, int]]]) -> tuple[Any, Mirror]:
    mirror = Mirror()
    first = mirror.new(5)
    table = catalog.create_table("db.t", mirror.arrow(first).schema)
    has_equality = False

    def append(to: Any, rows: list[Row]) -> None:
        to.append(mirror.arrow(rows, to.schema().column_names))
        mirror.rows += rows

    append(table, first)
    mirror.remember(table.current_snapshot().snapshot_id)
    for what, (count, step, rest) in history:
        table = catalog.load_table("db.t")
        names = mirror.names
        key = names["id"]
        if has_equality and what in {"delete", "upsert", "compact"}:
            continue  # pyiceberg does not rewrite files that have equality deletes
        if what == "append":
            append(table, mirror.new(count))
        elif what == "delete":
            gone = sorted(mirror.ids_of(step, rest))
            if gone:
                table.delete(f"{key} in ({', '.join(map(str, gone))})")
                mirror.drop(gone)
        elif what == "upsert":
            rows = [{**row, "x": -row["id"], "s": None} for row in mirror.rows[:count]]
            if rows:
                ids = {row["id"] for row in rows}
                known = mirror.arrow(rows, table.schema().column_names)
                table.overwrite(known, f"{key} in ({', '.join(map(str, ids))})")
                mirror.drop(ids)
                mirror.rows += rows
        elif what == "add column" and len(mirror.columns) < 8:
            with table.update_schema() as change:
                change.add_column(mirror.add_column(), LongType())
        elif what == "drop column" and "x" not in {field.name for field in table.spec().fields}:
            with table.update_schema(allow_incompatible_changes=True) as change:
                change.delete_column(names["x"])
            with catalog.load_table("db.t").update_schema() as change:
                change.add_column(names["x"], LongType())  # another one, in spite of its name
            mirror.rows = [{**row, "x": None} for row in mirror.rows]
        elif what == "rename":
            before, after = mirror.rename(count)
            with table.update_schema() as change:
                change.rename_column(before, after)
        elif what == "reorder":
            with table.update_schema() as change:
                change.move_first(names["x"])
        elif what == "partition":
            with table.update_spec() as change:
                if table.spec().fields:
                    change.remove_field(table.spec().fields[0].name)
                else:
                    change.add_identity(names[["k", "s", "d", "k"][rest]])
        elif what == "compact" and mirror.rows:
            table.overwrite(table.scan().to_arrow())
        elif what == "concurrent":
            other = catalog.load_table("db.t")
            rows, more = mirror.new(count), mirror.new(1)

            def try_to_append(handle: Any, added: list[Row]) -> None:
                with contextlib.suppress(CommitFailedException):  # the other was first
                    append(handle, added)

            at_once(lambda: try_to_append(table, rows), lambda: try_to_append(other, more))  # noqa: B023
        elif what == "positions":
            for path, file in list(data_files(table).items())[:2]:
                found = [(number, row) for number, row in enumerate(_ids_of(path, table, key)) if row % step == rest]
                if found:
                    places = {"file_path": [f"file://{path}"] * len(found), "pos": [number for number, _ in found]}
                    where = {"partition": list(file.partition), "spec_id": file.spec_id}
                    add_deletes(catalog.load_table("db.t"), pa.table(places), **where)
                    mirror.drop({row for _, row in found})
        elif what == "equality":
            column = ["id", "x", "s"][count % 3]
            values = [f"s{rest}", None] if column == "s" else [rest, step, count + 5, *([None] * (column == "x"))]
            files = data_files(table)
            if table.spec().fields:  # of one partition
                one = next((file for file in files.values() if file.spec_id == table.spec().spec_id), None)
                if one is None:
                    continue
                of = repr(list(one.partition))
                files = {
                    path: file
                    for path, file in files.items()
                    if file.spec_id == one.spec_id and repr(list(file.partition)) == of
                }
                where = {"partition": list(one.partition), "spec_id": one.spec_id}
            else:
                where = {"spec_id": table.spec().spec_id}
            rows_of = {row for path in files for row in _ids_of(path, table, key)}
            rows_given = pa.table({names[column]: pa.array(values, TYPES.get(column, pa.int64()))})
            add_deletes(table, rows_given, equality=[names[column]], **where)
            has_equality = True
            mirror.drop({row["id"] for row in mirror.rows if row["id"] in rows_of and row.get(column) in values})
        elif what == "expire":
            table.maintenance.expire_snapshots().older_than(dt.datetime.now(dt.timezone.utc)).commit()
            kept = {one.snapshot_id for one in catalog.load_table("db.t").snapshots()}
            mirror.versions = {version: known for version, known in mirror.versions.items() if version in kept}
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
    "drop column",
    "rename",
    "reorder",
    "partition",
    "compact",
    "concurrent",
    "positions",
    "equality",
    "expire",
)


def check_iceberg(history: Any, size: int, wanted: int) -> None:
    with folder() as path, catalog_in(path) as catalog, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded, mirror = run_iceberg(catalog, history)
        mirror.check(open_table(loaded), size, wanted)
        mirror.check_versions(loaded)
        with loaded.update_schema() as change:
            change.add_column("new", LongType())

        def default(metadata: dict[str, Any]) -> None:
            metadata["schemas"][-1]["fields"][-1]["initial-default"] = 42

        rows = [{**row, "new": 42} for row in mirror.rows]
        check_rows(open_table(as_version_3(loaded, default)), rows, {**mirror.names, "new": "new"})


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
    lance.write_dataset(mirror.arrow(mirror.rows), url)
    for what, (count, step, rest) in history:
        table = lance.dataset(url)
        key, other = mirror.names["id"], mirror.names["x"]
        if what == "append":
            rows = mirror.new(count)
            lance.write_dataset(mirror.arrow(rows, table.schema.names), url, mode="append", max_rows_per_file=step)
            mirror.rows += rows
        elif what == "delete":
            table.delete(f"{key} % {step} = {rest}")
            mirror.drop(mirror.ids_of(step, rest))
        elif what == "update":
            table.update({other: f"{other} + 1000"}, where=f"{key} % {step} = {rest}")
            for row in mirror.rows:
                row["x"] = row["x"] + 1000 if row["id"] % step == rest and row["x"] is not None else row["x"]
        elif what == "merge":
            source = [{**row, "x": -row["id"], "s": None} for row in mirror.rows[:count]] + mirror.new(1)
            merge = table.merge_insert(key).when_matched_update_all().when_not_matched_insert_all()
            merge.execute(mirror.arrow(source, table.schema.names))
            mirror.drop({row["id"] for row in source})
            mirror.rows += source
        elif what == "add column" and len(mirror.columns) < 8:
            name = mirror.add_column()
            table.add_columns({name: f"{key} * 7"})
            for row in mirror.rows:
                row[name] = 7 * row["id"]
        elif what == "rename":
            before, after = mirror.rename(count)
            table.alter_columns({"path": before, "name": after})
        elif what == "compact":
            table.optimize.compact_files()
        elif what == "concurrent":
            handles, parts = (table, lance.dataset(url)), (mirror.new(count), mirror.new(1))

            def append(number: int) -> None:
                rows = mirror.arrow(parts[number], table.schema.names)  # noqa: B023
                lance.write_dataset(rows, handles[number], mode="append")  # noqa: B023

            at_once(lambda: append(0), lambda: append(1))
            mirror.rows += [*parts[0], *parts[1]]
        elif what == "clean up":
            table.cleanup_old_versions(older_than=dt.timedelta(0), delete_unverified=True)
            mirror.versions.clear()
        mirror.remember(lance.dataset(url).version)
    return mirror


LANCE = histories("append", "delete", "update", "merge", "add column", "rename", "compact", "concurrent", "clean up")


def check_lance(history: Any, size: int, wanted: int) -> None:
    with folder() as path:
        mirror = run_lance(str(path / "t"), history)
        mirror.check(open_table(path / "t"), size, wanted)
        mirror.check_versions(path / "t")


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
