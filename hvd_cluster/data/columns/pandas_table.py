"""A pandas DataFrame as an Arrow table.

Its object columns may hold arrays of any dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hvd_cluster.data.optional import load_pyarrow
from hvd_cluster.data.schema import each_column
from hvd_cluster.errors import DataError

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa


def to_table(frame: pd.DataFrame, columns: Sequence[str]) -> pa.Table:
    """The named columns of a DataFrame.

    Missing values (None, NaN, NA) become nulls. Object columns may hold lists, NumPy arrays of any dimension, torch
    tensors, Spark ML vectors, strings or bytes.
    """
    existing = [str(name) for name in frame.columns]
    return _table(columns, existing, lambda name: _to_array(frame.iloc[:, existing.index(name)]))


def table_of(row: Mapping[str, Any]) -> pa.Table:
    """One row as a table; NaN stays NaN.

    Its values are what object columns may hold, or numbers, dates and times.
    """

    def column(name: str) -> Any:
        value = row[name]
        if _is_array(value):
            return _stacked([value])
        return load_pyarrow().array([value], from_pandas=type(value).__name__ in {"NAType", "NaTType"})

    return _table(list(row), list(row), column)


def _table(columns: Sequence[str], existing: Sequence[str], to_array: Callable[[str], Any]) -> pa.Table:
    pyarrow = load_pyarrow()

    def column(name: str) -> Any:
        try:
            return to_array(name)
        except (pyarrow.ArrowException, ValueError, TypeError, OverflowError) as error:
            raise DataError(f"column {name!r} cannot be converted: {error}") from error

    arrays, problems = each_column(columns, existing, column)
    if problems:
        raise DataError("\n".join(problems))
    return pyarrow.table(arrays)


def _to_array(series: pd.Series[Any]) -> Any:
    pyarrow = load_pyarrow()
    if series.dtype == object:
        values = series.to_numpy()
        first = next((value for value in values if not _is_missing(value)), None)
        if _is_array(first):
            return _stacked(values)
    if hasattr(series.dtype, "fill_value"):  # a SparseDtype, which Arrow does not take
        series = series.sparse.to_dense()
    return pyarrow.array(series, from_pandas=True)


def _is_array(value: Any) -> bool:
    """Whether a value of a column is an array that Arrow does not take."""
    return getattr(value, "ndim", 0) > 1 or hasattr(value, "toArray") or hasattr(value, "detach")


def _is_missing(value: Any) -> bool:
    """Whether an object is what pandas has for no value.

    A join leaves NaN, also among arrays.
    """
    return value is None or type(value).__name__ == "NAType" or (isinstance(value, float) and value != value)


def _stacked(values: Any) -> Any:
    """Arrays of one shape as (nested) fixed-size lists, nulls where there is None."""
    pyarrow = load_pyarrow()
    arrays = [None if _is_missing(value) else _to_numpy(value) for value in values]
    present = [array for array in arrays if array is not None]
    shapes = sorted({array.shape for array in present})
    if len(shapes) > 1:
        raise DataError(
            f"it holds arrays of different shapes, {shapes[0]} and {shapes[1]}: pad or cut them to one shape"
        )
    if len(present) < len(arrays):
        # Only counted: nulls in used columns are an error later on.
        return pyarrow.array([None if array is None else array.reshape(-1) for array in arrays], from_pandas=True)
    stacked = np.stack(present)
    nested = pyarrow.array(np.ascontiguousarray(stacked).reshape(-1))
    for length in reversed(stacked.shape[1:]):
        nested = pyarrow.FixedSizeListArray.from_arrays(nested, length)
    return nested


def _to_numpy(value: Any) -> Any:
    if hasattr(value, "toArray"):
        return np.asarray(value.toArray())
    if hasattr(value, "detach"):
        return value.detach().cpu().numpy()
    return np.asarray(value)
