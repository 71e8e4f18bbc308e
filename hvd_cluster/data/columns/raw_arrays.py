"""An Arrow column of any type as the array that a user's function over batches gets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hvd_cluster.data.columns.arrays import to_numpy
from hvd_cluster.data.columns.arrow_values import is_list, list_lengths
from hvd_cluster.data.optional import load_pyarrow
from hvd_cluster.data.schema import Column, Kind, column_of
from hvd_cluster.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa


def raw_array(column: pa.ChunkedArray) -> npt.NDArray[Any]:
    """A column of n rows as an array of memory of its own, which may be written to.

    Returns:
        Numbers and bools: shape (n,), in the column's dtype (decimals float64); with nulls as NaN, in float64 if
        the column holds no floats. Dates: datetime64[D]. Timestamps and durations: datetime64[us] (UTC) and
        timedelta64[us], whatever the unit of the column; nulls as NaT.
        Vectors, and lists of numbers that have one length in these rows: shape (n, *length); otherwise an array for
        each row. Strings, bytes, structs and maps: objects (``str``, ``bytes``, ``dict``, list of pairs), nulls as
        None.
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
    if found.kind is Kind.TIME and not types.is_time(array.type):
        times = array.to_numpy(zero_copy_only=False)
        return np.array(times if types.is_date(array.type) else times.astype(f"{times.dtype.kind}8[us]"))
    if found.kind in {Kind.NUMERIC, Kind.BOOL}:
        return _numbers(array, found)
    if found.kind in {Kind.VECTOR, Kind.LIST} and not array.null_count:
        return _lists(array, found)
    return _objects(array.to_pylist())


def _numbers(array: pa.Array, column: Column) -> npt.NDArray[Any]:
    if not array.null_count:
        return to_numpy(array, column).copy()
    if column.kind is Kind.BOOL:
        array = array.cast("uint8")
    wanted = column.dtype if column.dtype.startswith("float") else "float64"
    return np.array(array.cast(wanted).to_numpy(zero_copy_only=False))


def _lists(array: pa.Array, column: Column) -> npt.NDArray[Any]:
    try:
        return to_numpy(array, column).copy()
    except DataError:  # of different lengths, or with nulls inside
        pass
    types = load_pyarrow("pyarrow.types")
    if is_list(types, array.type) and not is_list(types, array.type.value_type):
        flat = _numbers(array.flatten(), Column("", Kind.NUMERIC, column.dtype))
        return _objects(np.split(flat, np.cumsum(list_lengths(array))[:-1]))
    return _objects([None if row is None else np.asarray(row, dtype=object) for row in array.to_pylist()])


def _objects(values: list[Any]) -> npt.NDArray[Any]:
    """One object a row: NumPy would make a matrix of lists of one length."""
    array = np.empty(len(values), dtype=object)
    for index, value in enumerate(values):
        array[index] = value
    return array
