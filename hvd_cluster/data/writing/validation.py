"""Which rows are for validation.

A pure function of the row's number, independent of batches.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hvd_cluster.data.comparison import compare
from hvd_cluster.data.optional import load_pyarrow
from hvd_cluster.data.writing.column_stats import ColumnStats, TableStats
from hvd_cluster.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa


def check(validation: object, columns: Collection[str] = ()) -> float | str | None:
    """The parameter in its one form: None, a column's name, or a ratio in (0, 1).

    Args:
        columns: those to train on, which the one that marks rows is not among.
    """
    if isinstance(validation, str) and validation in columns:
        raise DataError(f"the validation column {validation!r} cannot be a feature, label or weight too")
    if validation is None or (isinstance(validation, str) and validation):
        return validation
    if isinstance(validation, bool) or not isinstance(validation, (int, float)):
        raise DataError(
            f"validation is {validation!r}: give a ratio in [0, 1), the name of a column (true or > 0 marks a row for "
            "validation), or None"
        )
    if not 0 <= validation < 1:
        raise DataError(f"validation is {validation!r}: a ratio must be >= 0 and < 1")
    return float(validation) or None


def ratio_mask(start: int, stop: int, ratio: float, seed: int, stream: int) -> npt.NDArray[np.bool_]:
    """Mark the rows ``[start, stop)`` of a stream that are for validation.

    The stream is cut into strata of ``1/ratio`` rows; one row of each, drawn by a hash of (seed, stream, stratum), is
    marked. So the share is exact to about one row per stream, and data in a periodic order is not sampled in step
    with it.

    Args:
        start, stop: row numbers within the stream.
        ratio: share of marked rows, in (0, 1).
        seed: of the draw.
        stream: number of the stream (partition), drawn independently.

    Returns:
        Shape (stop - start,); the same for a row whatever ``start`` and ``stop`` it is asked with.
    """
    if ratio > 0.5:
        # Strata shorter than two rows would draw the same row twice: draw the rows that stay instead.
        return ~ratio_mask(start, stop, 1 - ratio, seed, stream)
    mask = np.zeros(stop - start, dtype=np.bool_)
    phase = _uniform(seed, stream, np.zeros(1, dtype=np.uint64), salt=1)[0]
    first = max(0, math.floor(start * ratio + phase) - 1)
    last = math.floor(stop * ratio + phase) + 1
    strata = np.arange(first, last + 2, dtype=np.uint64)
    edges = np.ceil((strata - phase) / ratio)
    rows = (edges[:-1] + np.floor(_uniform(seed, stream, strata[:-1], salt=2) * np.diff(edges))).astype(np.int64)
    rows = rows[(rows >= start) & (rows < stop)]
    mask[rows - start] = True
    return mask


def _uniform(seed: int, stream: int, counters: npt.NDArray[np.uint64], salt: int) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1) as a hash of (seed, stream, salt, counter).

    SplitMix64 (Steele, Lea, Flood 2014).
    """
    mask = (1 << 64) - 1
    key = _mix(np.array([(seed * 0x9E3779B97F4A7C15 + stream * 0xD1B54A32D192ED03 + salt) & mask], dtype=np.uint64))
    return (_mix(counters * np.uint64(0x9E3779B97F4A7C15) + key) >> np.uint64(11)).astype(np.float64) / float(1 << 53)


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def column_mask(array: pa.Array, name: str, stats: TableStats) -> npt.NDArray[np.bool_]:
    """Mark the rows whose value is true, or a number above 0.

    Returns:
        Shape (n,).
    """
    compute, types = load_pyarrow("pyarrow.compute"), load_pyarrow("pyarrow.types")
    check_column(name, array.type)
    stats.columns.setdefault(name, ColumnStats()).nulls += array.null_count
    marked = array if types.is_boolean(array.type) else compare(array, ">", 0)
    return np.asarray(compute.fill_null(marked, False).to_numpy(zero_copy_only=False), dtype=np.bool_)


def check_column(name: str, arrow_type: Any) -> None:
    """Check that a column of this Arrow type can mark rows for validation."""
    types = load_pyarrow("pyarrow.types")
    numeric = types.is_integer(arrow_type) or types.is_floating(arrow_type) or types.is_decimal(arrow_type)
    if not (types.is_boolean(arrow_type) or numeric):
        raise DataError(
            f"the validation column {name!r} holds {arrow_type}: it must be bool, or numeric with > 0 for validation"
        )
