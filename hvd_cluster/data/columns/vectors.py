"""Spark ML vectors between their Arrow layout and dense matrices.

Both ways, without a Python loop over rows. A vector is a struct: ``type`` 1 is dense (only ``values`` is set), ``type``
0 is sparse (``size``, ``indices``, ``values``).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hvd_cluster.data.columns.arrow_values import list_lengths, ragged_text, view
from hvd_cluster.data.optional import load_pyarrow
from hvd_cluster.data.schema import UNKNOWN, Column
from hvd_cluster.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa


def vector_type() -> Any:
    """The Arrow struct that Spark stores a ``VectorUDT`` in."""
    pyarrow = load_pyarrow()
    return pyarrow.struct(
        [
            pyarrow.field("type", pyarrow.int8(), nullable=False),
            pyarrow.field("size", pyarrow.int32()),
            pyarrow.field("indices", pyarrow.list_(pyarrow.field("element", pyarrow.int32(), nullable=False))),
            pyarrow.field("values", pyarrow.list_(pyarrow.field("element", pyarrow.float64(), nullable=False))),
        ]
    )


def lengths(array: pa.StructArray) -> npt.NDArray[np.int64]:
    """The number of dimensions of each vector, shape (n,); nulls must be gone."""
    sizes = load_pyarrow("pyarrow.compute").fill_null(array.field(1), 0)
    return np.where(is_sparse(array), view(sizes).astype(np.int64), list_lengths(array.field(3)))


def is_sparse(array: pa.StructArray) -> npt.NDArray[np.bool_]:
    """Whether each vector is sparse, shape (n,)."""
    return np.asarray(view(array.field(0)) == 0)


def dense(array: pa.StructArray, column: Column) -> npt.NDArray[np.float64]:
    """The vectors of a column as a matrix.

    Args:
        array: n vectors, dense and sparse ones in any mixture, no nulls.
        column: its shape has d elements; ``(UNKNOWN,)`` takes d from the first vector.

    Returns:
        Shape (n, d), float64. It shares the array's memory where all vectors are dense.
    """
    n = len(array)
    d = lengths(array)
    size = math.prod(column.shape) if UNKNOWN not in column.shape else (int(d[0]) if n else 0)
    wrong = np.flatnonzero(d != size)
    if len(wrong):
        raise DataError(ragged_text(column.name, size, int(d[wrong[0]]), f" (row {int(wrong[0])} of the batch)"))
    sparse = is_sparse(array)
    if not sparse.any():
        return np.asarray(_elements(array.field(3)).reshape(n, size))
    matrix = np.zeros((n, size), dtype=np.float64)
    if not sparse.all():
        matrix[~sparse] = _elements(_select(array.field(3), ~sparse)).reshape(-1, size)
    indices, values = _select(array.field(2), sparse), _select(array.field(3), sparse)
    counts = list_lengths(values)
    positions = _elements(indices)
    if not np.array_equal(counts, list_lengths(indices)) or (
        len(positions) and (positions.min() < 0 or positions.max() >= size)
    ):
        raise DataError(f"column {column.name!r} holds a broken sparse vector: its indices do not fit its size {size}")
    matrix[np.repeat(np.flatnonzero(sparse), counts), positions] = _elements(values)
    return matrix


def from_matrix(matrix: npt.NDArray[Any]) -> pa.StructArray:
    """A matrix of shape (n, d) as n dense vectors, float64."""
    pyarrow = load_pyarrow()
    n, size = matrix.shape
    arrow_type = vector_type()
    values = pyarrow.array(np.ascontiguousarray(matrix, dtype=np.float64).reshape(-1))
    offsets = pyarrow.array(np.arange(n + 1, dtype=np.int32) * np.int32(size))
    return pyarrow.StructArray.from_arrays(
        [
            pyarrow.array(np.ones(n, dtype=np.int8)),
            pyarrow.nulls(n, pyarrow.int32()),
            pyarrow.nulls(n, arrow_type.field(2).type),
            pyarrow.ListArray.from_arrays(offsets, values, type=arrow_type.field(3).type),
        ],
        fields=[arrow_type.field(index) for index in range(4)],
    )


def _select(array: pa.Array, mask: npt.NDArray[np.bool_]) -> pa.Array:
    return array if mask.all() else array.filter(load_pyarrow().array(mask))


def _elements(array: pa.ListArray) -> npt.NDArray[Any]:
    """All elements of lists without null lists, one after the other."""
    return view(array.flatten())
