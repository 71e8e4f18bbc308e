"""One Arrow array -> one NumPy array, without a Python loop over rows.

Without a copy where the type allows it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hvd_cluster.data.columns.arrow_values import (
    inner_nulls_text,
    is_list,
    list_depth,
    nulls_text,
    ragged_text,
    time_of_day,
    view,
)
from hvd_cluster.data.columns.vectors import dense
from hvd_cluster.data.optional import load_pyarrow
from hvd_cluster.data.schema import UNKNOWN, Column, ColumnKind
from hvd_cluster.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

#: Units of time, coarsest first.
UNITS = ("s", "ms", "us", "ns")


def to_numpy(array: pa.Array, column: Column) -> npt.NDArray[Any]:
    """The values of a numeric, bool, time, list or vector column.

    Args:
        array: a ``pyarrow.Array`` (not chunked) of n rows, in any type that :func:`hvd_cluster.data.schema.column_of`
            maps to this column's kind and dtype.
        column: what the column holds; an UNKNOWN length is taken from the rows.

    Returns:
        Shape (n, *shape), dtype ``column.dtype``. It may share the array's memory: writing to it writes there.

    Raises:
        DataError: there are nulls, lists of unequal length, or numbers that do not fit; the text names the column.
    """
    types = load_pyarrow("pyarrow.types")
    if types.is_dictionary(array.type):
        array = array.dictionary_decode()  # before nulls are counted: the distinct values may hold one
    if array.null_count:
        raise DataError(nulls_text(column.name, array.null_count))
    if column.kind is ColumnKind.VECTOR and types.is_struct(array.type):
        matrix = _converted(dense(array, column), column)
        return matrix if UNKNOWN in column.shape else matrix.reshape((len(array), *column.shape))
    n = len(array)
    expected = column.shape
    if len(expected) > 1 and list_depth(array.type) == 1:
        # Written by us: every shape is flat on disk, the schema knows the true one.
        expected = (math.prod(expected),)
    lengths: list[int] = []
    while is_list(types, array.type):
        wanted = expected[len(lengths)] if len(lengths) < len(expected) else UNKNOWN
        array, length = _flatten(types, array, column.name, wanted)
        if array.null_count:
            raise DataError(inner_nulls_text(column.name, array.null_count))
        lengths.append(length)
    values = _primitive(types, array, column)
    shape = tuple(lengths) if len(lengths) >= len(column.shape) else column.shape
    return values.reshape((n, *shape))


def flat_lists(array: pa.Array, column: Column) -> pa.Array:
    """Nested lists as one list for each row, as a declared shape has it.

    Nulls stay for the reader.

    Raises:
        DataError: there are nulls inside, or lists of unequal length.
    """
    pyarrow, types = load_pyarrow(), load_pyarrow("pyarrow.types")
    if array.null_count:
        return array
    values, length = array, math.prod(column.shape)
    while is_list(types, values.type):
        values, _ = _flatten(types, values, column.name, UNKNOWN)
        if values.null_count:
            raise DataError(inner_nulls_text(column.name, values.null_count))
    if len(values) != len(array) * length:
        raise DataError(ragged_text(column.name, length, len(values) // len(array)))
    return pyarrow.FixedSizeListArray.from_arrays(values, length)


def stores_as_is(arrow_type: Any, column: Column) -> bool:
    """Whether values of an Arrow type are numbers of the column's dtype, bit for bit."""
    types = load_pyarrow("pyarrow.types")
    numbers = types.is_integer(arrow_type) or types.is_floating(arrow_type)
    return bool(numbers and arrow_type.to_pandas_dtype() == np.dtype(column.dtype))


def _flatten(types: Any, array: pa.Array, name: str, expected: int) -> tuple[pa.Array, int]:
    """The elements of equal lists one after the other, and the lists' length."""
    if types.is_fixed_size_list(array.type):
        length = int(array.type.list_size)
        if expected not in {UNKNOWN, length}:
            raise DataError(ragged_text(name, expected, length))
        return array.flatten(), length
    offsets = view(array.offsets)
    lengths = np.diff(offsets)
    if expected == UNKNOWN:
        expected = int(lengths[0]) if len(lengths) else 0
    wrong = np.flatnonzero(lengths != expected)
    if len(wrong):
        raise DataError(ragged_text(name, expected, int(lengths[wrong[0]]), f" (row {int(wrong[0])} of the batch)"))
    start, stop = (int(offsets[0]), int(offsets[-1])) if len(offsets) else (0, 0)
    return array.values.slice(start, stop - start), expected


def _primitive(types: Any, array: pa.Array, column: Column) -> npt.NDArray[Any]:
    """Scalars without nulls, in the column's dtype."""
    if types.is_boolean(array.type):
        # Arrow packs eight into a byte.
        return view(array.cast("uint8")).view(np.bool_).astype(column.dtype, copy=False)
    if column.unit and types.is_temporal(array.type):
        return _times(types, array, column)
    if types.is_decimal(array.type):
        array = array.cast("float64")
    elif not (types.is_integer(array.type) or types.is_floating(array.type)):
        raise DataError(f"column {column.name!r} was to hold {column.dtype}, but it holds {array.type}")
    if types.is_unsigned_integer(array.type) and column.dtype in {"int32", "int64"}:
        try:
            array = array.cast(column.dtype)
        except ValueError as error:
            raise DataError(
                f"column {column.name!r} holds unsigned integers that do not fit {column.dtype}: {error}; cast it to "
                "double"
            ) from error
    return _converted(view(array), column)


def _converted(values: npt.NDArray[Any], column: Column) -> npt.NDArray[Any]:
    """Values in the column's dtype.

    A finite one that becomes infinite, or a whole one that changes, is an error.
    """
    if values.dtype == column.dtype:
        return values
    try:
        with np.errstate(over="raise", invalid="ignore"):
            converted = values.astype(column.dtype)
            changed = values.dtype.kind in "iu" and converted.dtype.kind == "f"
            changed = changed and not np.array_equal(converted.astype(values.dtype), values)
        if changed:
            raise DataError(
                f"column {column.name!r} holds whole numbers that no {column.dtype} is equal to, and {column.dtype} in "
                "other files: write the files with one type"
            )
        return converted
    except FloatingPointError as error:
        raise DataError(
            f"column {column.name!r} holds values beyond the range of {column.dtype}: leave them as they are"
        ) from error


def _times(types: Any, array: pa.Array, column: Column) -> npt.NDArray[np.int64]:
    """Timestamps, dates and durations as counts of the column's unit.

    Finer digits are cut off.
    """
    pyarrow = load_pyarrow()
    try:
        if column.unit == "D":
            array = array.cast(pyarrow.date32(), safe=False)
        elif types.is_date(array.type):
            array = array.cast(pyarrow.timestamp(column.unit))
        elif array.type.unit != column.unit:
            finer = UNITS.index(column.unit) > UNITS.index(array.type.unit)
            array = array.cast(_in_unit(types, array.type, column.unit), safe=finer)
    except (ValueError, NotImplementedError) as error:
        raise DataError(f"column {column.name!r} holds times that do not fit {column.unit!r}: {error}") from error
    counts = array.view(pyarrow.int32() if array.type.bit_width == 32 else pyarrow.int64())
    return view(counts).astype(np.int64, copy=False)


def _in_unit(types: Any, arrow_type: Any, unit: str) -> Any:
    """The type of a time, counted in another unit."""
    pyarrow = load_pyarrow()
    if types.is_timestamp(arrow_type):
        return pyarrow.timestamp(unit, arrow_type.tz)
    if types.is_duration(arrow_type):
        return pyarrow.duration(unit)
    return time_of_day(unit)
