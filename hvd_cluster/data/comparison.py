"""Compares Arrow columns with a user's values, exactly as Python does.

Arrow's kernels first cast both sides to one type. The cast truncates some values and refuses others, so here each value
becomes a value of the column's type instead: itself, or the next lower one.
"""

from __future__ import annotations

import datetime as dt
import decimal
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from hvd_cluster.data.columns.arrow_values import is_bytes, is_text
from hvd_cluster.data.optional import load_pyarrow

#: Comparison -> Arrow's kernel.
_KERNELS = {"==": "equal", "!=": "not_equal", "<": "less", "<=": "less_equal", ">": "greater", ">=": "greater_equal"}
#: Unit of time -> nanoseconds.
_UNIT_NS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
_DAY_NS = 86_400 * 10**9
_EPOCH_DAY = dt.date(1970, 1, 1).toordinal()
#: Holds all digits of any Arrow decimal.
_CONTEXT = decimal.Context(prec=80)


class Measure(NamedTuple):
    """A value that compares exactly with all others of its kind."""

    #: "number", "text", "moment" (without a time zone), "instant" (with one), "time" or "duration".
    kind: str
    #: int, float or Decimal; bytes of a string; nanoseconds of times, since 1970 where they are moments or instants.
    value: Any


class _Grid(NamedTuple):
    """The values of an Arrow type: whole multiples of a unit."""

    kind: str
    unit: int | Fraction
    #: Bounds of the multiples.
    low: int
    high: int


def is_missing(value: Any) -> bool:
    """Whether a value is None, NaT, ``pandas.NA`` or a null of Arrow.

    NaT may be that of pandas or NumPy.
    """
    return value is None or (not isinstance(value, (str, bytes)) and str(value) in {"NaT", "<NA>", "None"})


def measured(value: Any) -> Measure:
    """What a Python, NumPy, pandas or Arrow scalar stands for.

    Raises:
        TypeError: there is no order of such values.
        ValueError: a string has no UTF-8 form.
    """
    if isinstance(value, load_pyarrow().Scalar):
        value = value.as_py()
    if isinstance(value, np.ndarray) and not value.ndim:
        value = value[()]
    if isinstance(value, (np.datetime64, np.timedelta64)):
        return _of_numpy_time(value)
    if isinstance(value, np.generic):
        value = float(value) if isinstance(value, np.floating) else value.item()
    if isinstance(value, decimal.Decimal) and value.is_nan():
        value = math.nan
    if isinstance(value, (int, float, decimal.Decimal)):
        return Measure("number", value)
    if isinstance(value, str):
        return Measure("text", value.encode())  # UTF-8 sorts as the text does
    if isinstance(value, (bytes, bytearray, memoryview)):
        return Measure("text", bytes(value))
    return _of_time(value)


def _of_numpy_time(value: Any) -> Measure:
    unit, count = np.datetime_data(value.dtype)
    if unit in {"Y", "M", "W", "D", "h", "m"}:
        value, unit, count = value.astype(f"{value.dtype.kind}8[s]"), "s", 1
    if unit not in _UNIT_NS:
        raise TypeError(f"times in units of {unit!r} are not supported")
    kind = "moment" if isinstance(value, np.datetime64) else "duration"
    return Measure(kind, int(value.astype(np.int64)) * count * _UNIT_NS[unit])


def _of_time(value: Any) -> Measure:
    if isinstance(value, dt.timedelta):
        return Measure("duration", _duration_ns(value))
    if isinstance(value, dt.datetime):
        naive_ns = (value.toordinal() - _EPOCH_DAY) * _DAY_NS + _clock_ns(value)
        offset = value.utcoffset()
        return Measure("moment", naive_ns) if offset is None else Measure("instant", naive_ns - _duration_ns(offset))
    if isinstance(value, dt.date):
        return Measure("moment", (value.toordinal() - _EPOCH_DAY) * _DAY_NS)
    if isinstance(value, dt.time) and value.tzinfo is None:
        return Measure("time", _clock_ns(value))
    raise TypeError(f"values of type {type(value).__name__} are not supported")


def _duration_ns(value: dt.timedelta) -> int:
    nanoseconds: int = getattr(value, "nanoseconds", 0)  # of pandas
    return (value.days * 86_400 + value.seconds) * 10**9 + value.microseconds * 1000 + nanoseconds


def _clock_ns(value: dt.time | dt.datetime) -> int:
    nanoseconds: int = getattr(value, "nanosecond", 0)  # of pandas
    seconds = (value.hour * 60 + value.minute) * 60 + value.second
    return seconds * 10**9 + value.microsecond * 1000 + nanoseconds


def aligned(number: Any, other: Any) -> Any:
    """A number as it is compared with another.

    Beside a Decimal, a float counts as the decimal that it prints. Beside a float, a Decimal counts as the nearest
    float.
    """
    if isinstance(number, float) and isinstance(other, decimal.Decimal):
        return number if math.isnan(number) else decimal.Decimal(repr(number))
    return float(number) if isinstance(number, decimal.Decimal) and isinstance(other, float) else number


def compare(column: Any, op: str, value: Any) -> Any:
    """Whether each row of an Arrow column compares so with a value.

    Null or False where the row is null.

    Args:
        column: ``pyarrow.ChunkedArray`` or ``Array`` of n values, without dictionaries.
        op: ``==``, ``!=``, ``<``, ``<=``, ``>`` or ``>=``.
        value: the value.

    Raises:
        TypeError: the two have no common order.
        ValueError: the column's type cannot hold the value.
    """
    pyarrow, compute = load_pyarrow(), load_pyarrow("pyarrow.compute")
    column = _widened(column)
    point, is_exact = floor(value, column.type)
    if is_exact:
        return getattr(compute, _KERNELS[op])(column, pyarrow.scalar(point, type=column.type))
    if op in {"==", "!="} or point is None or point != point:
        answer = op == "!=" or (op[0] == ">" and point is None)
        return compute.and_(compute.is_valid(column), pyarrow.scalar(answer))
    return getattr(compute, _KERNELS["<=" if op[0] == "<" else ">"])(column, pyarrow.scalar(point, type=column.type))


def is_in(column: Any, values: Sequence[Any]) -> Any:
    """Whether each row of an Arrow column equals one of several values.

    Otherwise as :func:`compare`.
    """
    pyarrow = load_pyarrow()
    column = _widened(column)
    points = [point for point, is_exact in (floor(value, column.type) for value in values) if is_exact]
    if pyarrow.types.is_floating(column.type) and 0 in points:
        points += [0.0, -0.0]  # is_in distinguishes them, unlike every comparison
    return load_pyarrow("pyarrow.compute").is_in(column, value_set=pyarrow.array(points, type=column.type))


def _widened(column: Any) -> Any:
    """The column in a type whose kernels exist and that holds all of its values."""
    pyarrow, arrow_type = load_pyarrow(), column.type
    if pyarrow.types.is_floating(arrow_type):
        if arrow_type.bit_width == 16:  # pyarrow 14 has no direct cast
            column = column.cast(pyarrow.float32())
        return column.cast(pyarrow.float64())
    if pyarrow.types.is_decimal(arrow_type) and arrow_type.bit_width < 128:
        return column.cast(pyarrow.decimal128(arrow_type.precision, arrow_type.scale))
    if not _is_text(arrow_type):
        return column
    is_small = pyarrow.types.is_string(arrow_type) or pyarrow.types.is_binary(arrow_type)
    return column.cast(pyarrow.binary() if is_small else pyarrow.large_binary())


def _is_text(arrow_type: Any) -> bool:
    return is_text(arrow_type) or is_bytes(arrow_type) or str(arrow_type) in {"string_view", "binary_view"}


def floor(value: Any, arrow_type: Any) -> tuple[Any, bool]:
    """The greatest value of a type that is at most a value, and if they are equal.

    Returns:
        What pyarrow makes a scalar of, None if all values of the type are above, or NaN.
    """
    types, text = load_pyarrow("pyarrow.types"), _is_text(arrow_type)
    if isinstance(value, str) and not text:
        value = load_pyarrow().scalar(value).cast(arrow_type).as_py()
    kind, number = measured(value)
    if text and kind == "text":
        return number, True
    if types.is_floating(arrow_type) and kind == "number":
        return _floor_of_doubles(number)
    grid = _grid(arrow_type)
    if grid is None or kind != grid.kind:
        raise TypeError(f"it is a {kind}")
    if types.is_decimal(arrow_type):
        number = aligned(number, decimal.Decimal())
    if number != number:
        return math.nan, False
    if number in {math.inf, -math.inf}:
        steps, is_exact = (grid.high if number > 0 else grid.low - 1), False
    else:
        multiple = Fraction(number) / grid.unit
        steps = min(math.floor(multiple), grid.high)
        is_exact = steps == multiple
    if steps < grid.low:
        return None, False
    if types.is_decimal(arrow_type):
        return decimal.Decimal(steps).scaleb(-arrow_type.scale, _CONTEXT), is_exact
    return (bool(steps) if types.is_boolean(arrow_type) else steps), is_exact


def _floor_of_doubles(number: Any) -> tuple[Any, bool]:
    number = aligned(number, 0.0)
    try:
        double = float(number)
    except OverflowError:  # of an int
        return (math.nextafter(math.inf, 0), False) if number > 0 else (-math.inf, False)
    if double > number:
        double = math.nextafter(double, -math.inf)
    return double, double == number


def _grid(arrow_type: Any) -> _Grid | None:
    types = load_pyarrow("pyarrow.types")
    if types.is_boolean(arrow_type):
        return _Grid("number", 1, 0, 1)
    if types.is_decimal(arrow_type):
        high = 10**arrow_type.precision - 1
        return _Grid("number", Fraction(10) ** -arrow_type.scale, -high, high)
    if types.is_unsigned_integer(arrow_type):
        return _Grid("number", 1, 0, 2**arrow_type.bit_width - 1)
    if types.is_signed_integer(arrow_type):
        kind, unit = "number", 1
    elif types.is_timestamp(arrow_type):
        kind, unit = ("moment" if arrow_type.tz is None else "instant"), _UNIT_NS[arrow_type.unit]
    elif types.is_date(arrow_type):
        kind, unit = "moment", (_DAY_NS if types.is_date32(arrow_type) else _UNIT_NS["ms"])
    elif types.is_time(arrow_type):
        kind, unit = "time", _UNIT_NS[arrow_type.unit]
    elif types.is_duration(arrow_type):
        kind, unit = "duration", _UNIT_NS[arrow_type.unit]
    else:
        return None
    half = 2 ** (arrow_type.bit_width - 1)
    return _Grid(kind, unit, -half, half - 1)
