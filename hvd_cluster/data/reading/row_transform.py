"""A user's function from row to row: ``transformation_fn``.

Rows come out of Arrow, and tensors out of what it returns.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from hvd_cluster.data.columns.arrays import to_numpy
from hvd_cluster.data.columns.arrow_values import is_list, list_lengths, nulls_text, python_values
from hvd_cluster.data.columns.column_config import Decode
from hvd_cluster.data.optional import load_pyarrow
from hvd_cluster.data.schema import WIDENED, Column, ColumnKind, Schema
from hvd_cluster.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

#: Takes one row as a dictionary (column name -> NumPy scalar, array, str or bytes) and returns the new row.
RowTransform = Callable[[dict[str, Any]], Mapping[str, Any]]
#: Calls of a function that fails through a bug of the interpreter.
_MAX_ATTEMPTS = 3


def rows(batch: pa.RecordBatch | pa.Table, schema: Schema) -> Iterator[dict[str, Any]]:
    """The rows of an Arrow batch as dictionaries.

    Values: NumPy scalars, ``np.ndarray`` of the row's shape for lists and vectors (float64), ``str``, ``bytes``. Lists
    may differ in length from row to row where the schema leaves it UNKNOWN.
    """
    columns = [_values(batch.column(column.name), column) for column in schema]
    for values in zip(*columns, strict=True):
        yield dict(zip(schema.names, values, strict=True))


def apply(
    transform: RowTransform,
    batch: pa.RecordBatch | pa.Table,
    schema: Schema,
    output: Schema | None,
    place: str,
    numbers: Sequence[int] | None = None,
    stopped: Callable[[], bool] = lambda: False,
    decode: Mapping[str, Decode] | None = None,
) -> tuple[dict[str, torch.Tensor], Schema]:
    """Run a transform over a batch and stack what it returns.

    Args:
        transform: the user's function.
        batch: n >= 1 rows.
        schema: of the batch.
        output: the columns that it must return; None takes them from the first row.
        place: where the rows come from, for messages.
        numbers: the number of each row, for messages; None counts from 0.
        stopped: asked before each row; when true, the rows so far are all there is.
        decode: column -> function that its values pass through before ``transform`` sees them.

    Returns:
        The tensors, each of shape ``(n, *column.shape)``, and the schema of the returned columns.

    Raises:
        DataError: the function raised (its exception is the cause), or a row does not match the first one.
    """
    made: dict[str, npt.NDArray[Any]] = {}
    count = 0
    for number, row in zip(range(batch.num_rows) if numbers is None else numbers, rows(batch, schema), strict=True):
        if stopped():
            break
        where = f"row {number} of {place}"
        again = functools.partial(_row, batch, schema, count, decode or {}, where)
        result = _called(transform, _decoded(row, decode or {}, where), f"transformation_fn failed on {where}", again)
        if not isinstance(result, Mapping):
            raise DataError(f"transformation_fn returned {type(result).__name__} for {where}: return a dict")
        if output is None:
            output = Schema(tuple(column_of_value(name, value, where) for name, value in result.items()))
        if not made:
            made = {column.name: np.empty((batch.num_rows, *column.shape), dtype=column.dtype) for column in output}
        for name, value in _checked(result, output, where).items():
            made[name][count] = value
        count += 1
    if output is None:
        raise DataError(f"there are no rows in {place} to learn from what transformation_fn returns")
    return {name: torch.from_numpy(values[:count]) for name, values in made.items()}, output


def _row(
    batch: pa.RecordBatch | pa.Table, schema: Schema, index: int, decode: Mapping[str, Decode], where: str
) -> dict[str, Any]:
    return _decoded(next(rows(batch.slice(index, 1), schema)), decode, where)


def _decoded(row: dict[str, Any], decode: Mapping[str, Decode], where: str) -> dict[str, Any]:
    return {**row, **{name: call_decode(function, row[name], name, where) for name, function in decode.items()}}


def call_decode(function: Decode, value: Any, name: str, where: str) -> Any:
    """What a decode function makes of a value.

    Its exceptions become a DataError that names column and row.
    """
    return _called(function, value, f"the decode function of column {name!r} failed on {where}")


def _called(
    function: Callable[[Any], Any],
    value: Any,
    failed: str,
    again: Callable[[], Any] | None = None,
    attempts: int = _MAX_ATTEMPTS,
) -> Any:
    """The result of a user's function.

    ``again`` makes the value of a new attempt, because the function may write into it.
    """
    try:
        return function(value)
    except Exception as error:  # the user's own code, which may raise anything
        if attempts > 1 and _is_parser_race(error):
            return _called(function, value if again is None else again(), failed, again, attempts - 1)
        raise DataError(f"{failed}: {type(error).__name__}: {error}") from error


def _is_parser_race(error: Exception) -> bool:
    """Whether the interpreter failed, and not the function.

    Until 3.11.8 CPython counted the recursion depth of all threads that parse Python text together, and one of them
    could get this error for nothing (github.com/python/cpython/issues/106905). ``np.load`` parses the header of each
    array as Python text, and users' functions call it in several threads of the reader.
    """
    return isinstance(error, SystemError) and "AST constructor recursion depth mismatch" in str(error)


def _checked(result: Mapping[str, Any], output: Schema, where: str) -> dict[str, npt.NDArray[Any]]:
    """The row's values as arrays of the shapes and dtypes of the first row."""
    if set(result) != set(output.names):
        raise DataError(
            f"transformation_fn returned the columns {sorted(map(str, result))} for {where}, but "
            f"{sorted(output.names)} for the first row"
        )
    values: dict[str, npt.NDArray[Any]] = {}
    for column in output:
        value = as_array(result[column.name])
        # Python's numbers have no width of their own: an int is fine where the first row had a float, not the reverse.
        fits = value.dtype.kind in "biuf" and np.can_cast(value.dtype, column.dtype, casting="same_kind")
        if value.shape != column.shape or not fits:
            raise DataError(
                f"transformation_fn returned shape {value.shape} and dtype {value.dtype} in column {column.name!r} for "
                f"{where}, but shape {column.shape} and dtype {column.dtype} for the first row"
            )
        values[column.name] = in_dtype_of_first(value, column, "transformation_fn", where)
    return values


def column_of_value(name: Any, value: Any, where: str, function: str = "transformation_fn") -> Column:
    """The column that a value which a user's function returned belongs to."""
    if not isinstance(name, str):
        raise DataError(f"{function} returned the key {name!r} for {where}: column names are strings")
    array = as_array(value)
    if array.dtype.kind not in "biuf":
        raise DataError(
            f"{function} returned {type(value).__name__} in column {name!r} for {where}: no tensor can be "
            "made of it; return numbers, arrays or tensors, and leave out columns that are not needed"
        )
    dtype = WIDENED.get(array.dtype.name, array.dtype.name)
    if array.shape:
        return Column(name, ColumnKind.LIST, dtype, array.shape)
    return Column(name, ColumnKind.BOOL if dtype == "bool" else ColumnKind.NUMERIC, dtype)


def as_array(value: Any) -> npt.NDArray[Any]:
    """A number, array or tensor as an array; others with the dtype object."""
    if isinstance(value, torch.Tensor):
        return np.asarray(value.detach().cpu().numpy())
    try:
        return np.asarray(value)
    except ValueError:  # lists of unequal length: reported as what no tensor can be made of
        return np.empty((), dtype=object)


def as_dtype(values: npt.NDArray[Any], dtype: Any) -> npt.NDArray[Any] | None:
    """Numbers in another dtype; None if they are out of its range.

    Fractions are cut off for integers.
    """
    if np.can_cast(values.dtype, dtype) or np.dtype(dtype).kind not in "iuf":
        return values.astype(dtype, copy=False)
    with np.errstate(invalid="ignore", over="ignore"):
        found = values.astype(dtype)
    if found.dtype.kind == "f":
        overflows = values.dtype.kind in "iuf" and not np.array_equal(np.isinf(found), np.isinf(values))
        return None if overflows else found
    whole = np.trunc(values) if values.dtype.kind == "f" else values
    return found if np.array_equal(found, whole) else None


def in_dtype_of_first(value: npt.NDArray[Any], column: Column, function: str, where: str) -> npt.NDArray[Any]:
    """What a user's function returned, in the dtype of the first row.

    The range of that dtype must hold it.
    """
    found = as_dtype(value, column.dtype)
    if found is None:
        what, remedy = ("a number", "") if np.dtype(column.dtype).kind == "f" else ("an integer", ", at most int64")
        raise DataError(
            f"{function} returned {what} in column {column.name!r} for {where} that {column.dtype}, the dtype of "
            f"the first row, cannot hold: return one dtype for all rows{remedy}"
        )
    return found


def _values(array: pa.Array | pa.ChunkedArray, column: Column) -> Iterable[Any]:
    """The column's values, row by row."""
    pyarrow = load_pyarrow()
    types = load_pyarrow("pyarrow.types")
    if array.null_count:
        raise DataError(nulls_text(column.name, array.null_count))
    if isinstance(array, pyarrow.ChunkedArray):
        array = array.combine_chunks()
        if isinstance(array, pyarrow.ChunkedArray):  # too large for 32-bit offsets
            return itertools.chain.from_iterable(_values(chunk, column) for chunk in array.chunks)
    if not column.has_tensor:
        return python_values(array)
    if is_list(types, array.type) and not types.is_fixed_size_list(array.type):
        lengths = list_lengths(array)
        if len(lengths) and (lengths != lengths[0]).any() and not is_list(types, array.type.value_type):
            # Each row keeps its own length: for the user's function to pad or cut.
            element = Column(column.name, ColumnKind.NUMERIC, column.dtype)
            flat = to_numpy(array.flatten(), element)
            ends = np.cumsum(lengths)
            return (flat[end - length : end] for end, length in zip(ends, lengths, strict=True))
    return to_numpy(array, column)
