"""A filter leaves out files by what the log says about them, and never one with a row that matches."""

from __future__ import annotations

import datetime as dt
import pickle
import random
from decimal import Decimal
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from iceberg_files import catalog_in, start_threads
from pyiceberg import transforms as iceberg_transforms
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.transforms import parse_transform

from hvd_cluster.data import open_table
from hvd_cluster.data.filters import parse

UTC = dt.timezone.utc
EPOCH = dt.datetime.fromisoformat("1970-01-01")
SCHEMA = pa.schema(
    {
        "id": pa.int64(),
        "k": pa.int32(),
        "x": pa.float64(),
        "s": pa.string(),
        "d": pa.date32(),
        "t": pa.timestamp("us"),
        "z": pa.timestamp("us", "UTC"),
        "m": pa.decimal128(9, 2),
        "w": pa.decimal128(30, 12),
    }
)


@pytest.fixture(scope="module", autouse=True)
def threads() -> None:
    start_threads()


@pytest.fixture(autouse=True)
def transforms_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """What pyiceberg-core, which is not installed, does when pyiceberg writes."""

    def of_arrow(self: Any, source: Any) -> Any:
        one, kind = self.transform(source), schema_to_pyarrow(self.result_type(source))

        def found(column: Any) -> Any:
            plain = column.cast(pa.int64()) if pa.types.is_timestamp(column.type) else column
            plain = plain.cast(pa.int32()) if pa.types.is_date(column.type) else plain
            values = [None if value is None else one(value) for value in plain.to_pylist()]
            return pa.array(values, pa.int32() if pa.types.is_date(kind) else kind)

        return found

    for name in ("Bucket", "Truncate", "Year", "Month", "Day", "Hour"):
        monkeypatch.setattr(getattr(iceberg_transforms, f"{name}Transform"), "pyarrow_transform", of_arrow)


def value(name: str, draw: random.Random) -> Any:
    """A value of a column, or one to compare it with that may lie between its values."""
    moment = EPOCH + dt.timedelta(hours=draw.randint(-60, 60), microseconds=draw.choice([0, 1, -1]))
    if draw.random() < 0.1:
        return None
    return {
        "id": draw.randint(-30, 30),
        "k": draw.randint(-2, 2),
        "x": draw.choice([draw.randint(-4, 4) / 4, float("nan"), -0.0]),
        "s": draw.choice(["", "a", "ab", "abc", "abd", "ü", "üa", "b" * 20]),
        "d": moment.date(),
        "t": moment,
        "z": moment.replace(tzinfo=UTC),
        "m": Decimal(draw.randint(-500, 500)).scaleb(-2),
        "w": Decimal(draw.randint(-5, 5) * 10 ** draw.randint(0, 16)).scaleb(-12),
    }[name]


def part(draw: random.Random) -> pa.Table:
    """Rows whose values are near each other."""
    base = {name: [value(name, draw) for _ in range(2)] for name in SCHEMA.names}
    rows = [{name: draw.choice(values) for name, values in base.items()} for _ in range(draw.randint(1, 5))]
    return pa.Table.from_pylist(rows, SCHEMA)


def conditions(draw: random.Random) -> list[list[Any]]:
    def condition() -> Any:
        name = draw.choice(SCHEMA.names)
        op = draw.choice(["==", "!=", "<", "<=", ">", ">=", "in", "not in", "is null", "is valid"])
        if op in {"in", "not in"}:
            return name, op, [one for one in (value(name, draw) for _ in range(3)) if one is not None]
        wanted = None
        while wanted is None:
            wanted = value(draw.choice(["x", "m", "id"]) if name in {"id", "k", "x", "m", "w"} else name, draw)
        return name, op, str(wanted) if name in {"d", "t"} and draw.random() < 0.2 else wanted

    return [[condition() for _ in range(draw.randint(1, 2))] for _ in range(draw.randint(1, 2))]


def rows_of(group: Any) -> pa.Table:
    stored = pq.ParquetFile(group.path).read()
    for name, given in group.partition:
        stored = stored.append_column(name, pa.array([given] * len(stored), SCHEMA.field(name).type))
    return stored.select(SCHEMA.names).cast(SCHEMA)


def require_no_file_is_missed(table: Any, draw: random.Random, times: int) -> int:
    """How many times a file was left out, none of which had a row that matches."""
    opened, left_out = open_table(table), 0
    rows = {group.path: rows_of(group) for group in opened.fragments(SCHEMA.names)}
    for _ in range(times):
        wanted = conditions(draw)
        row_filter = parse(wanted)
        assert row_filter is not None
        found = {group.path for group in opened.fragments(["id"], row_filter)}
        for path in rows.keys() - found:
            left_out += 1
            assert not any(row_filter.mask(rows[path]).to_pylist()), (wanted, rows[path].to_pylist())
    return left_out


TRANSFORMS = [
    {"t": "day"},
    {"z": "hour", "k": "identity"},
    {"d": "month", "id": "bucket[4]"},
    {"t": "year", "s": "truncate[2]"},
    {"m": "truncate[50]", "w": "bucket[3]"},
    {"id": "truncate[7]", "d": "identity", "k": "void"},
    {"s": "bucket[3]", "m": "identity"},
    {"t": "bucket[5]", "z": "identity", "s": "identity"},
]


@pytest.mark.parametrize("transforms", TRANSFORMS, ids=str)
def test_an_iceberg_file_with_matching_rows_is_never_left_out(tmp_path: Path, transforms: dict[str, str]) -> None:
    draw = random.Random(str(transforms))
    with catalog_in(tmp_path) as catalog:
        table = catalog.create_table("db.t", SCHEMA)
        table.append(part(draw))
        with table.update_spec() as change:
            for name, transform in transforms.items():
                change.add_field(name, parse_transform(transform), f"{name}_part")
        for _ in range(4):
            table.append(part(draw))
        assert require_no_file_is_missed(table, draw, 300) > 300


def test_a_delta_file_with_matching_rows_is_never_left_out(tmp_path: Path) -> None:
    for seed in range(4):
        draw = random.Random(seed)
        path = str(tmp_path / str(seed))
        for _ in range(8):
            deltalake.write_deltalake(path, part(draw), mode="append", partition_by=["k"] if seed % 2 else None)
        assert require_no_file_is_missed(path, draw, 200) > 200


@pytest.mark.parametrize(
    ("column", "transform", "condition"),
    [
        (
            pa.array([EPOCH + dt.timedelta(days=i, hours=5) for i in range(19723, 19727)]),
            "day",
            ("c", ">=", "2024-01-04"),
        ),
        (pa.array([0, 1, 2, 3]), "bucket[64]", ("c", "in", [3])),
        (pa.array(["aa", "ab", "ba", "bb"]), "truncate[1]", ("c", "==", "bb")),
    ],
)
def test_hidden_partitions_of_iceberg_rule_out_files(
    tmp_path: Path, column: pa.Array, transform: str, condition: Any
) -> None:
    rows = pa.table({"id": [0, 1, 2, 3], "c": column.cast(pa.timestamp("us")) if "day" in transform else column})
    with catalog_in(tmp_path) as catalog:
        options = {"write.metadata.metrics.default": "none"}  # nothing but partitions decides
        table = catalog.create_table("db.t", rows.schema, properties=options)
        with table.update_spec() as change:
            change.add_field("c", parse_transform(transform), "part")
        table.append(rows)
        opened = open_table(table)
        opened.fragments(["id"], parse([condition]))
        assert 1 <= len(opened.footers) <= 2


@pytest.mark.parametrize(
    "values",
    [
        [dt.datetime(2024, 1, 1 + i, 5, tzinfo=UTC) for i in range(4)],
        [EPOCH + dt.timedelta(days=i, hours=5) for i in range(4)],
        [Decimal(i) / 4 for i in range(4)],
    ],
)
@pytest.mark.parametrize("table_format", ["Delta", "Iceberg"])
def test_bounds_of_times_and_decimals_rule_out_files(tmp_path: Path, values: list[Any], table_format: str) -> None:
    kind = pa.decimal128(9, 2) if isinstance(values[0], Decimal) else pa.array(values).type
    parts = [pa.table({"id": [i], "c": pa.array([one], kind)}) for i, one in enumerate(values)]
    with catalog_in(tmp_path) as catalog:
        table = catalog.create_table("db.t", parts[0].schema) if table_format == "Iceberg" else str(tmp_path / "t")
        for rows in parts:
            if table_format == "Iceberg":
                table.append(rows)
            else:
                deltalake.write_deltalake(table, rows, mode="append")
        opened = open_table(table)
        assert sum(group.rows for group in opened.fragments(["id"], parse([("c", ">=", values[3])]))) == 1
        assert len(opened.footers) == 1


@pytest.mark.parametrize("op", ["==", "in"])
def test_partitions_of_times_before_1970_decide_nothing(tmp_path: Path, op: str) -> None:
    early = EPOCH - dt.timedelta(hours=43)  # day -2, and -1 for writers that rounded towards zero
    rows = pa.table({"id": [0, 1], "c": pa.array([early, EPOCH + dt.timedelta(days=9)], pa.timestamp("us"))})
    with catalog_in(tmp_path) as catalog:
        table = catalog.create_table("db.t", rows.schema, properties={"write.metadata.metrics.default": "none"})
        with table.update_spec() as change:
            change.add_field("c", parse_transform("day"), "part")
        table.append(rows)
        opened = open_table(table)
        opened.fragments(["id"], parse([("c", op, [early] if op == "in" else early)]))
        assert len(opened.footers) == 2


def test_workers_read_without_the_library(tmp_path: Path) -> None:
    rows = pa.table({"id": [0, 1], "c": [0, 1]})
    with catalog_in(tmp_path) as catalog:
        table = catalog.create_table("db.t", rows.schema)
        with table.update_spec() as change:
            change.add_field("c", parse_transform("identity"), "part")
        table.append(rows)
        assert b"pyiceberg" not in pickle.dumps(open_table(table))


@pytest.mark.parametrize("op", ["is valid", "is null"])
def test_a_file_with_null_structs_is_read_for_either_question(tmp_path: Path, op: str) -> None:
    deltalake.write_deltalake(str(tmp_path / "t"), pa.table({"id": [1, 2], "s": [{"a": 1}, None]}))
    assert len(open_table(tmp_path / "t").fragments(["id"], parse([("s", op, None)]))) == 1


def test_fields_of_structs_and_columns_with_dots_are_not_confused(tmp_path: Path) -> None:
    structs = [{"a": 100}, {"a": 200}]
    deltalake.write_deltalake(str(tmp_path / "t"), pa.table({"id": [1, 2], "s.a": [1, 2], "s": structs}))
    assert open_table(tmp_path / "t").fragments(["id"], parse([("s.a", "<=", 2)]))
