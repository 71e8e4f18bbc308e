"""An Arrow column of any type as the array for a function over batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hvd_cluster.data.columns.arrays import to_numpy
from hvd_cluster.data.columns.arrow_values import is_list, list_lengths, view
from hvd_cluster.data.optional import load_pyarrow
from hvd_cluster.data.schema import ColumnKind, column_of
from hvd_cluster.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa


def raw_array(column: pa.ChunkedArray) -> npt.NDArray[Any]:
    """A column of n rows as an array of memory of its own, which may be written to.

    Returns:
        Numbers and bools: shape (n,), in the column's dtype (decimals float64); with nulls as NaN, in float64 if
        the column holds no floats, or as None among objects if no float64 is equal to one of the numbers. Dates:
        datetime64[D]. Timestamps and durations: datetime64[us] (UTC) and timedelta64[us], whatever the unit of the
        column; nulls as NaT.
        Vectors, and lists of numbers that have one length in these rows: shape (n, *length), with nulls in the lists
        as for numbers; otherwise an array for each row. Strings, bytes, structs and maps: objects (``str``, ``bytes``,
        ``dict``, list of pairs). If rows of these, or of vectors and lists, are null: objects, and None for these rows.
    """
    array = column.combine_chunks()
    if isinstance(array, load_pyarrow().ChunkedArray):  # of no rows, or too large for one chunk
        array = load_pyarrow().concat_arrays(array.chunks) if array.num_chunks else load_pyarrow().array([], array.type)
    types = load_pyarrow("pyarrow.types")
    if types.is_dictionary(array.type):
        array = array.dictionary_decode()
    try:
        found = column_of("", array.type)
    except DataError:
        return _objects(array.to_pylist())
    if found.kind is ColumnKind.TIME and not types.is_time(array.type):
        times = array.to_numpy(zero_copy_only=False)
        return np.array(times.astype(f"{times.dtype.kind}8[{'D' if types.is_date(array.type) else 'us'}]"))
    if found.kind in {ColumnKind.NUMERIC, ColumnKind.BOOL}:
        return _numbers(array)
    if found.kind is ColumnKind.VECTOR:
        return _with_none(array, _vectors)
    if found.kind is ColumnKind.LIST:
        return _with_none(array, _lists)
    return _objects(array.to_pylist())


def _numbers(array: pa.Array) -> npt.NDArray[Any]:
    types = load_pyarrow("pyarrow.types")
    if types.is_decimal(array.type):
        array = array.cast("float64")
    if array.null_count and types.is_boolean(array.type):
        array = array.cast("uint8")
    if array.null_count and not types.is_floating(array.type):
        try:
            array = array.cast("float64")
        except ValueError:  # beyond the whole numbers that all have an equal float64
            return _objects(array.to_pylist())
    return np.array(array.to_numpy(zero_copy_only=False))


def _with_none(array: pa.Array, convert: Callable[[pa.Array], npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """What ``convert`` makes of the rows that are not null.

    With nulls, the array has objects, and None for these.
    """
    if not array.null_count:
        return convert(array)
    found = np.empty(len(array), dtype=object)
    rows = np.flatnonzero(view(array.is_valid().cast("uint8")))
    for row, value in zip(rows, convert(array.drop_null()), strict=True):
        found[row] = value
    return found


def _vectors(array: pa.Array) -> npt.NDArray[Any]:
    column = column_of("", array.type)
    try:
        return to_numpy(array, column).copy()
    except DataError:  # of different lengths
        return _objects([to_numpy(array.slice(row, 1), column)[0].copy() for row in range(len(array))])


def _lists(array: pa.Array) -> npt.NDArray[Any]:
    """Lists, none of which is null, of numbers or lists."""
    types, elements = load_pyarrow("pyarrow.types"), array.flatten()
    inner = _with_none(elements, _lists) if is_list(types, elements.type) else _numbers(elements)
    lengths = list_lengths(array)
    if types.is_fixed_size_list(array.type):
        return inner.reshape(len(array), array.type.list_size, *inner.shape[1:])
    if len(set(lengths)) > 1:
        return _objects(np.split(inner, np.cumsum(lengths)[:-1]))
    return inner.reshape(len(array), lengths[0] if len(lengths) else 0, *inner.shape[1:])


def _objects(values: list[Any]) -> npt.NDArray[Any]:
    """One object a row: NumPy would make a matrix of lists of one length."""
    array = np.empty(len(values), dtype=object)
    for index, value in enumerate(values):
        array[index] = value
    return array
