"""Filters: the rows that Python would choose, whatever the row groups' statistics decide without reading them."""

from __future__ import annotations

import datetime as dt
import decimal
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from python_operators import PYTHON_OPERATORS

from hvd_cluster.data.filters import RowFilter, Statistics, parse
from hvd_cluster.data.reader import ParquetReader
from hvd_cluster.data.reading.table_columns import TableColumns
from hvd_cluster.data.tables.parquet import ParquetFolder
from hvd_cluster.errors import DataError

numbers = st.sampled_from([0.0, -0.0, math.inf, -math.inf, 1.0, 2.0, -3.0])
integers = st.integers(-3, 3)
texts = st.sampled_from(["", "a", "b", "bb", "é"])


def conditions(name: str, values: Any) -> Any:
    return st.one_of(
        st.tuples(st.just(name), st.sampled_from(["==", "!=", "<", "<=", ">", ">="]), values),
        st.tuples(st.just(name), st.sampled_from(["in", "not in"]), st.lists(values, min_size=1, max_size=3)),
        st.tuples(st.just(name), st.sampled_from(["is null", "is valid"])),
    )


any_condition = st.one_of(conditions("x", numbers), conditions("i", integers), conditions("s", texts))
cells = (st.none() | st.just(math.nan) | numbers, st.none() | integers, st.none() | texts)
rows = st.lists(st.tuples(*cells), min_size=1, max_size=12)


def holds(row: dict[str, Any], condition: tuple[Any, ...]) -> bool:
    name, op = condition[:2]
    value = row[name]
    if op in {"is null", "is valid"}:
        return (value is None) == (op == "is null")
    return value is not None and bool(PYTHON_OPERATORS[op](value, condition[2]))


@pytest.mark.long
@settings(max_examples=100, deadline=None)
@example(rows=[(0.0, None, None)], group_rows=1, filters=[[("x", "in", [-0.0])]])
@given(
    rows=rows,
    group_rows=st.integers(1, 5),
    filters=st.lists(st.lists(any_condition, min_size=1, max_size=3), min_size=1, max_size=2),
)
def test_the_rows_are_those_that_python_chooses(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Any], group_rows: int, filters: list[list[Any]]
) -> None:
    columns = [list(column) for column in zip(*rows, strict=True)]
    types = [pa.float64(), pa.int64(), pa.string()]
    arrays = [pa.array(values, arrow_type) for values, arrow_type in zip(columns, types, strict=True)]
    table = pa.table(arrays, names=["x", "i", "s"]).append_column("id", pa.array(range(len(rows))))
    path = tmp_path_factory.getbasetemp() / "filters.parquet"
    pq.write_table(table, path, row_group_size=group_rows)
    expected = [
        row["id"] for row in table.to_pylist() if any(all(holds(row, one) for one in group) for group in filters)
    ]
    options: Any = {"batch_size": 100, "shuffle": False, "remainder": "partial", "filters": filters}
    if not expected:
        with pytest.raises(DataError, match="no rows to read in .* that the filters let through"):
            ParquetReader(path, ["id"], **options)
        return
    reader = ParquetReader(path, ["id"], **options)
    assert reader.rows == len(expected)
    assert [row for batch in reader for row in batch["id"].tolist()] == expected


def test_row_groups_that_statistics_rule_out_or_prove_are_not_counted_by_reading(tmp_path: Path) -> None:
    table = pa.table({"i": range(100), "y": [float(i) for i in range(100)]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=10)
    folder = TableColumns(ParquetFolder(pa.fs.LocalFileSystem(), [(str(tmp_path / "a.parquet"), "")]), ["y"])
    wanted = parse([("i", ">=", 25), ("i", "<", 40)])
    assert wanted is not None
    read: list[int] = []
    original = folder.read
    folder.read = lambda group, columns: (read.append(group.index), original(group, columns))[1]  # type: ignore[method-assign]
    assert [(group.index, group.rows) for group in folder.filtered(wanted)] == [(2, 5), (3, 10)]
    assert read == [2]


def test_a_filter_shards_and_shuffles_what_it_lets_through(tmp_path: Path) -> None:
    table = pa.table({"i": range(1000), "odd": [i % 2 for i in range(1000)]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=64)
    seen: list[int] = []
    for rank in range(3):
        reader = ParquetReader(
            tmp_path, ["i"], filters=[("odd", "=", 1)], batch_size=8, rank=rank, size=3, window_bytes=1024
        )
        batches = [batch["i"].tolist() for batch in reader]
        assert [len(batch) for batch in batches] == [8] * 20 == [8] * reader.steps
        seen += [row for batch in batches for row in batch]
    assert len(set(seen)) == 480
    assert all(row % 2 for row in seen)


def test_dates_and_moments_are_compared_as_python_has_them(tmp_path: Path) -> None:
    days = [dt.date(2024, 1, 1) + dt.timedelta(days=i) for i in range(50)]
    moments = [dt.datetime(2024, 1, 1, 12) + dt.timedelta(days=i) for i in range(50)]  # noqa: DTZ001
    table = pa.table({"i": range(50), "day": days, "moment": moments})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=7)

    def chosen(condition: Any) -> list[int]:
        (batch,) = ParquetReader(
            tmp_path, ["i"], filters=[condition], batch_size=50, remainder="partial", shuffle=False
        )
        return batch["i"].tolist()

    assert chosen(("day", ">", dt.date(2024, 2, 10))) == list(range(41, 50))
    assert chosen(("moment", "<", dt.datetime(2024, 1, 3, 13))) == [0, 1, 2]  # noqa: DTZ001


def test_null_and_nan_statistics_never_prove_what_they_do_not_cover() -> None:
    def verdict(condition: Any, **known: Any) -> bool | None:
        return RowFilter(((condition,),)).verdict(lambda _: Statistics(rows=10, **known))

    assert verdict(("x", "<", 5), nulls=0, low=1, high=4) is True
    assert verdict(("x", "<", 5), nulls=0, low=1.0, high=4.0) is None  # a NaN may hide there
    assert verdict(("x", "<", 5), nulls=1, low=1, high=4) is None
    assert verdict(("x", "<", 5), low=1, high=4) is None
    assert verdict(("x", "<", 5), nulls=1, low=5, high=9) is False
    assert verdict(("x", "!=", 5.0), nulls=0, low=5.0, high=5.0) is None
    assert verdict(("x", "!=", 5), nulls=0, low=5, high=5) is False
    assert verdict(("x", "not in", (5, 6)), nulls=0, low=1, high=4) is True
    assert verdict(("x", "in", (5, 6)), nulls=3, low=1, high=4) is False
    assert verdict(("x", "is valid", None), nulls=0) is True
    assert verdict(("x", "is null", None), nulls=10) is True
    assert verdict(("x", "is null", None)) is None
    assert verdict(("x", "<", "text"), nulls=0, low=1, high=4) is None


def test_choices_are_one_value_whatever_their_order_and_number() -> None:
    same = [["b", "a", None], {"a", "b"}, ("a", "b", "b"), iter("ba")]
    assert len({repr(parse([("s", "in", choices)])) for choices in same}) == 1
    script = "from hvd_cluster.data.filters import parse; print(parse([('s', 'in', {'de', 'fr', 'us', 'it'})]))"
    told = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in (1, 2)
    }
    assert len(told) == 1


@pytest.mark.parametrize(
    ("arrow_type", "value"),
    [
        (pa.decimal128(5, 2), 0.1),
        (pa.decimal128(5, 2), decimal.Decimal("0.1")),
        (pa.decimal128(5, 2), decimal.Decimal("0.1000")),
        (pa.float64(), decimal.Decimal("0.1")),
        (pa.float64(), 0.1),
        (pa.float32(), 0.1),
        (pa.float32(), 0.5),
    ],
    ids=str,
)
def test_statistics_compare_numbers_as_the_rows_do(tmp_path: Path, arrow_type: Any, value: Any) -> None:
    texts = [str(value), str(value), "7", "8"]
    make = float if pa.types.is_floating(arrow_type) else decimal.Decimal
    table = pa.table({"i": range(4), "x": pa.array(list(map(make, texts)), arrow_type)})
    found: dict[bool, list[Any]] = {}
    for statistics in (True, False):
        pq.write_table(table, tmp_path / "a.parquet", row_group_size=2, write_statistics=statistics)
        found[statistics] = []
        for op in ("==", "!=", "<", "<=", ">", ">=", "in", "not in"):
            try:
                reader = ParquetReader(
                    tmp_path,
                    ["i"],
                    filters=[("x", op, [value] if "in" in op else value)],
                    batch_size=4,
                    remainder="partial",
                    shuffle=False,
                )
                found[statistics].append((op, [row for batch in reader for row in batch["i"].tolist()]))
            except DataError as error:
                found[statistics].append((op, str(error)[:50].replace(str(tmp_path), "")))
    assert found[True] == found[False]
    rows = dict(found[True])
    assert rows["=="] == rows["in"]
    assert rows["!="] == rows["not in"]
    if arrow_type != pa.float32():
        assert rows["=="] == [0, 1]


EPOCH = dt.datetime(1970, 1, 1)  # noqa: DTZ001


def filtered_rows(path: Path, condition: Any) -> list[int]:
    """The ids of the rows that a condition lets through."""
    try:
        reader = ParquetReader(path, ["id"], filters=[condition], batch_size=100, remainder="partial", shuffle=False)
    except DataError as error:
        assert "no rows to read" in str(error)  # noqa: PT017
        return []
    return [row for batch in reader for row in batch["id"].tolist()]


@pytest.mark.parametrize("missing", [None, pd.NaT, pd.NA, np.datetime64("NaT"), np.timedelta64("NaT")])
def test_missing_values_are_neither_chosen_nor_compared(missing: Any) -> None:
    assert parse([("t", "in", [missing])]) == RowFilter(((("t", "in", ()),),))
    with pytest.raises(DataError, match="nulls are found with 'is null'"):
        parse([("t", "==", missing)])


def test_texts_are_read_as_the_type_of_their_column(tmp_path: Path) -> None:
    table = pa.table(
        {"id": range(3), "day": pa.array([0, 1, 2], pa.date32()), "t": pa.array([0, 1, 2], pa.timestamp("ns"))}
    )
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=1)
    assert filtered_rows(tmp_path, ("day", ">=", "1970-01-02")) == [1, 2]
    assert filtered_rows(tmp_path, ("day", "in", ["1970-01-02"])) == [1]
    assert filtered_rows(tmp_path, ("t", "==", "1970-01-01 00:00:00.000000001")) == [1]


def test_bounds_of_decimals_beside_floats_decide_nothing(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [decimal.Decimal("0.3000000000000000000001")]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"x": [0.5]}), tmp_path / "b.parquet")
    with ParquetReader(tmp_path, batch_size=1, filters=[("x", "==", 0.3)]) as reader:
        assert [batch["x"].tolist() for batch in reader] == [[0.3]]


def test_bounds_beyond_the_years_of_python_decide_nothing(tmp_path: Path) -> None:
    table = pa.table({"id": range(3), "t": pa.array([-(2**62), 0, 2**62], pa.timestamp("us"))})
    pq.write_table(table, tmp_path / "a.parquet")
    assert filtered_rows(tmp_path, ("t", ">", EPOCH)) == [2]


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        ([("i", "~", 1)], r"\('i', '~', 1\) in filters is not a condition.*'not in'"),
        ([("i", "==", None)], "nulls are found with 'is null'"),
        ([("i", "in", "abc")], "is not a condition"),
        ([("i", "in", 3)], "is not a condition"),
        ("i > 1", "give a list of"),
        ([], "give a list of"),
        ([[]], "empty list"),
        ([("zzz", "==", 1)], "there is no column 'zzz'"),
        ([("i", "==", "text")], "'i' holds int64, which cannot be compared with 'text'"),
        ([("i", "<", dt.date(2024, 1, 1))], "'i' holds int64, which cannot be compared with datetime.date"),
        ([("i", "in", [object])], "'i' holds int64, which cannot be compared with"),
    ],
)
def test_what_is_not_a_filter_is_refused(tmp_path: Path, filters: Any, message: str) -> None:
    pq.write_table(pa.table({"i": range(10)}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=f"(?s){message}"):
        ParquetReader(tmp_path, ["i"], batch_size=2, filters=filters)
