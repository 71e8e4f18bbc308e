"""Columns of every type and values of every kind: statistics and rows give what Python's comparison gives."""

from __future__ import annotations

import datetime as dt
import decimal
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from python_operators import PYTHON_OPERATORS

from hvd_cluster.data.filters import parse
from hvd_cluster.data.reading.parquet_files import statistics_of

#: Unit of time -> nanoseconds.
NS = {"D": 86_400 * 10**9, "s": 10**9, "ms": 10**6, "us": 1000, "ns": 1}
EPOCH = dt.datetime(1970, 1, 1)  # noqa: DTZ001
ROME = dt.timezone(dt.timedelta(hours=2))


def around(*centres: int, low: int, high: int) -> Any:
    """Integers near some others and near the bounds."""
    near = {centre + step for centre in (0, low, high, *centres) for step in (-1, 0, 1)}
    return st.sampled_from(sorted(number for number in near if low <= number <= high))


def typed(arrow_type: Any, cells: Any, unit: Any, marks: Any = ()) -> Any:
    """(Arrow type, strategy of its cells, the number that a cell is)."""
    return pytest.param(arrow_type, cells, unit, id=str(arrow_type), marks=marks)


def moment(ns: int, tz: Any = None) -> list[Any]:
    """All that a user may write for nanoseconds since 1970."""
    whole_us, rest = divmod(ns, 1000)
    if tz is not None:
        stamp = pd.Timestamp(ns, tz="UTC").tz_convert(tz)
        return (
            [stamp] if rest else [stamp, (EPOCH + dt.timedelta(microseconds=whole_us)).replace(tzinfo=dt.timezone.utc)]
        )
    values = [np.datetime64(ns, "ns"), pd.Timestamp(ns)]
    if not rest:
        values += [np.datetime64(whole_us, "us"), EPOCH + dt.timedelta(microseconds=whole_us)]
    if ns % NS["D"] == 0:
        values += [np.datetime64(ns // NS["D"], "D"), EPOCH.date() + dt.timedelta(days=ns // NS["D"])]
    return values


def duration(ns: int) -> list[Any]:
    whole_us, rest = divmod(ns, 1000)
    values = [np.timedelta64(ns, "ns"), pd.Timedelta(ns)]
    return values if rest else [*values, np.timedelta64(whole_us, "us"), dt.timedelta(microseconds=whole_us)]


def numbers_with_truth() -> list[tuple[Any, Any]]:
    """(What a user may write, the number that it is.)"""
    bounds = [0, 2**7, 2**8, 2**15, 2**31, 2**32, 2**53, 2**63, 2**64, 10**30, 10**400]
    whole = sorted({sign * bound + step for bound in bounds for sign in (-1, 1) for step in (-1, 0, 1)})
    values: list[Any] = [
        *whole,
        True,
        False,
        np.True_,
        np.int8(-3),
        np.uint64(2**64 - 1),
        np.int64(-(2**63)),
        np.array(2),
    ]
    values += [0.5, -0.5, 2.9, -0.0, 0.1, 1.75e18, 2.0**63, 2.0**64, -(2.0**63), 1e300, 5e-324]
    values += [np.float32(0.1), np.float16(0.5), np.float64(2.5), np.array(2.5)]
    values += [decimal.Decimal(text) for text in ("2.5", "0.1", "-0.005", "1E+30", "99.99", "3.00")]
    found = [
        (value, Fraction(value.item() if isinstance(value, (np.generic, np.ndarray)) else value)) for value in values
    ]
    infinite = [math.inf, -math.inf, math.nan, np.float32("inf"), decimal.Decimal("Infinity"), decimal.Decimal("NaN")]
    return found + [(value, float(value)) for value in infinite]


NUMBERS = numbers_with_truth()
CLOCK_NS = [0, 1, 500, 999, 1000, 5000, 10**6, 10**9, 3600 * 10**9, NS["D"] - 1]
SPAN_NS = [
    *CLOCK_NS,
    NS["D"],
    5 * NS["D"] + 1,
    18_263 * NS["D"],
    18_263 * NS["D"] + 18_000 * 10**9,
    -1,
    -1000,
    -NS["D"],
]
VALUES = {
    "number": NUMBERS,
    "moment": [(value, ns) for ns in SPAN_NS for value in moment(ns)],
    "instant": [(value, ns) for ns in SPAN_NS for tz in (dt.timezone.utc, ROME) for value in moment(ns, tz)],
    "time": [(dt.time(), 0), (dt.time(0, 0, 0, 5), 5000), (dt.time(1), 3600 * 10**9), (dt.time(0, 0, 1), 10**9)],
    "duration": [(value, ns) for ns in SPAN_NS for value in duration(ns)],
    "text": [
        (value, text.encode())
        for text in ("", "a", "ab", "b", "é", "\U0001f600", "\uffff")
        for value in (text, text.encode(), np.str_(text), bytearray(text.encode()))
    ],
}
INTEGERS = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]
LARGE = (3, 2**53, 2**53 + 2, 1_750_000_000_000_000_000, 2**63)


def whole_numbers(arrow_type: Any) -> Any:
    is_signed = pa.types.is_signed_integer(arrow_type)
    high = 2 ** (arrow_type.bit_width - is_signed)
    return around(*LARGE, low=-high * is_signed, high=high - 1)


def times(arrow_type: Any, unit: str, spans: list[int]) -> Any:
    return typed(arrow_type, st.sampled_from(sorted({ns // NS[unit] for ns in spans})), NS[unit])


FLOATS = [0.0, -0.0, 0.5, 2.5, 0.1, 1.0, 3.0, math.inf, -math.inf, math.nan]
TYPES = [
    *(typed(arrow_type, whole_numbers(arrow_type), 1) for arrow_type in INTEGERS),
    typed(pa.bool_(), st.booleans(), 1),
    typed(pa.float16(), st.sampled_from([*map(np.float16, FLOATS)]), None, pytest.mark.needs("pyarrow>=16")),
    typed(pa.float32(), st.sampled_from([float(np.float32(value)) for value in FLOATS]), None),
    typed(pa.float64(), st.sampled_from([*FLOATS, 2.0**53, 2.0**63, 1.75e18, 1e300, 1.7976931348623157e308]), None),
    *(
        typed(arrow_type, around(10, 250, 1000, 300, low=-9999, high=9999), Fraction(1, 100))
        for arrow_type in (pa.decimal128(4, 2), pa.decimal256(40, 2))
    ),
    typed(pa.decimal128(38, 0), around(*LARGE, 10**30, low=1 - 10**38, high=10**38 - 1), 1),
    times(pa.date32(), "D", SPAN_NS),
    times(pa.time32("s"), "s", CLOCK_NS),
    times(pa.time32("ms"), "ms", CLOCK_NS),
    times(pa.time64("us"), "us", CLOCK_NS),
    times(pa.time64("ns"), "ns", CLOCK_NS),
    *(times(pa.timestamp(unit), unit, SPAN_NS) for unit in ("s", "ms", "us", "ns")),
    *(times(pa.timestamp(unit, "Europe/Rome"), unit, SPAN_NS) for unit in ("s", "ms", "us", "ns")),
    *(times(pa.duration(unit), unit, SPAN_NS) for unit in ("s", "ms", "us", "ns")),
    *(
        typed(arrow_type, st.sampled_from(["", "a", "ab", "b", "é", "\U0001f600"]), None)
        for arrow_type in (pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string()))
    ),
    *(
        typed(arrow_type, st.sampled_from([b"", b"a", b"ab", b"\xff"]), None)
        for arrow_type in (pa.binary(), pa.large_binary())
    ),
    typed(pa.binary(2), st.sampled_from([b"ab", b"a\x00", b"\xff\xff"]), None),
]


def kind_of(arrow_type: Any) -> str:
    types = pa.types
    if types.is_timestamp(arrow_type):
        return "moment" if arrow_type.tz is None else "instant"
    kinds = {types.is_date: "moment", types.is_time: "time", types.is_duration: "duration"}
    is_number = types.is_integer(arrow_type) or types.is_floating(arrow_type) or types.is_decimal(arrow_type)
    other = "number" if is_number or types.is_boolean(arrow_type) else "text"
    return next((kind for test, kind in kinds.items() if test(arrow_type)), other)


def true_number(arrow_type: Any, value: Any, truth: Any) -> Any:
    """A float counts as the decimal that it prints beside decimals, and a decimal as a float beside floats."""
    if pa.types.is_decimal(arrow_type) and isinstance(value, float) and math.isfinite(value):
        return Fraction(repr(float(value)))
    if pa.types.is_floating(arrow_type) and isinstance(value, decimal.Decimal):
        return float(value)
    return truth


def array_of(arrow_type: Any, cells: list[Any]) -> Any:
    if pa.types.is_decimal(arrow_type):
        scale = arrow_type.scale
        cells = [
            cell if cell is None else decimal.Decimal(cell).scaleb(-scale, decimal.Context(prec=80)) for cell in cells
        ]
    if pa.types.is_dictionary(arrow_type):
        return pa.array(cells, arrow_type.value_type).dictionary_encode()
    return pa.array(cells, arrow_type)


@pytest.mark.parametrize(("arrow_type", "cells", "unit"), TYPES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_all_types_are_compared_as_python_compares_whatever_the_row_groups(
    arrow_type: Any, cells: Any, unit: Any, data: Any
) -> None:
    column = data.draw(st.lists(st.none() | cells, min_size=1, max_size=6), label="cells")
    op = data.draw(st.sampled_from(list(PYTHON_OPERATORS)), label="op")
    candidates = st.sampled_from(VALUES[kind_of(arrow_type)])
    several = data.draw(st.lists(candidates, min_size=1, max_size=1 if "in" not in op else 3), label="value")
    truths = [true_number(arrow_type, *pair) for pair in several]

    def matches(cell: Any) -> bool:
        if cell is None:
            return False
        mine = cell.encode() if isinstance(cell, str) else float(cell) if isinstance(cell, np.floating) else cell
        mine = mine if unit is None else mine * unit
        return PYTHON_OPERATORS[op](mine, [truth for truth in truths if truth == truth] if "in" in op else truths[0])

    value = [value for value, _ in several] if "in" in op else several[0][0]
    row_filter = parse([("x", op, value)])
    assert row_filter is not None
    expected = [matches(cell) for cell in column]
    for rows_per_group in (1, 6):
        stored = pa.BufferOutputStream()
        pq.write_table(pa.table({"x": array_of(arrow_type, column)}), stored, row_group_size=rows_per_group)
        file = pq.ParquetFile(pa.BufferReader(stored.getvalue()))
        for index in range(file.num_row_groups):
            wanted = expected[index * rows_per_group : (index + 1) * rows_per_group]
            allowed = {None, wanted[0]} if len(set(wanted)) == 1 else {None}
            assert row_filter.mask(file.read_row_group(index)).to_pylist() == wanted
            assert row_filter.verdict(statistics_of(file.metadata, index, ["x"])) in allowed
