"""What an Arrow array holds, seen from NumPy and Python.

Views of its memory, the lengths of its lists, its objects.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hvd_cluster.data.optional import load_pyarrow
from hvd_cluster.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa


def is_list(types: Any, arrow_type: Any) -> bool:
    """Whether an Arrow type is a list of a layout that becomes tensors.

    There are three.
    """
    return bool(types.is_list(arrow_type) or types.is_large_list(arrow_type) or types.is_fixed_size_list(arrow_type))


def is_text(arrow_type: Any) -> bool:
    """Whether an Arrow type is one of strings."""
    types = load_pyarrow("pyarrow.types")
    return bool(types.is_string(arrow_type) or types.is_large_string(arrow_type))


def is_bytes(arrow_type: Any) -> bool:
    """Whether an Arrow type is one of bytes, of any length or of a fixed one."""
    types = load_pyarrow("pyarrow.types")
    return is_variable_bytes(arrow_type) or bool(types.is_fixed_size_binary(arrow_type))


def is_variable_bytes(arrow_type: Any) -> bool:
    """Whether an Arrow type is one of bytes of any length."""
    types = load_pyarrow("pyarrow.types")
    return bool(types.is_binary(arrow_type) or types.is_large_binary(arrow_type))


def time_of_day(unit: str) -> pa.DataType:
    """The Arrow type of times of the day in a unit."""
    pyarrow = load_pyarrow()
    return pyarrow.time32(unit) if unit in {"s", "ms"} else pyarrow.time64(unit)


def list_depth(arrow_type: Any) -> int:
    """Levels of lists around the elements; 0 for scalars."""
    types = load_pyarrow("pyarrow.types")
    depth = 0
    while is_list(types, arrow_type):
        arrow_type, depth = arrow_type.value_type, depth + 1
    return depth


def list_lengths(array: pa.Array) -> npt.NDArray[np.int64]:
    """The length of each list, shape (n,); 0 for nulls."""
    compute = load_pyarrow("pyarrow.compute")
    lengths = compute.fill_null(compute.list_value_length(array), 0)
    return np.asarray(lengths.to_numpy(zero_copy_only=False), dtype=np.int64)


def nested(array: pa.ChunkedArray, shape: Sequence[int]) -> pa.ChunkedArray | pa.Array:
    """Flat rows of several dimensions as nested lists.

    Files that we write have them flat.
    """
    if len(shape) < 2 or list_depth(array.type) != 1:
        return array
    pyarrow = load_pyarrow()
    lists = pyarrow.concat_arrays(array.chunks).flatten()
    for length in reversed(shape):
        lists = pyarrow.FixedSizeListArray.from_arrays(lists, length)
    return lists


def without_dictionaries(table: pa.Table) -> pa.Table:
    """The table with values in place of dictionaries (pandas's categories)."""
    for index, field in enumerate(table.schema):
        if hasattr(field.type, "index_type"):
            table = table.set_column(index, field.name, table.column(index).cast(field.type.value_type))
    return table


#: Values that are Python objects at a time.
_OBJECTS = 64


def python_values(array: pa.Array) -> Iterator[Any]:
    """The values of an Arrow array as Python objects, of which few exist at a time."""
    for begin in range(0, len(array), _OBJECTS):
        part = array.slice(begin, _OBJECTS)
        yield from (part.dictionary_decode() if hasattr(part, "dictionary_decode") else part).to_pylist()


class _Memory:
    """A window on an Arrow buffer in NumPy's array interface; keeps the buffer alive.

    Not ``array.to_numpy()``: that is marked read-only, and torch warns of each such array. What is handed out is memory
    that only we hold, or is copied (see :func:`hvd_cluster.data.reading.tensors.to_tensors`).
    """

    def __init__(self, buffer: Any, address: int, length: int, typestr: str) -> None:
        self.buffer = buffer
        self.__array_interface__ = {"version": 3, "shape": (length,), "typestr": typestr, "data": (address, False)}


def view(array: pa.Array) -> npt.NDArray[Any]:
    """A writable NumPy view of a fixed-width Arrow array without nulls, shape (n,)."""
    dtype = np.dtype(array.type.to_pandas_dtype())
    if dtype.kind == "O" or array.type.bit_width != 8 * dtype.itemsize:
        raise DataError(f"NumPy has no view of {array.type}: cast it to numbers")
    buffer = array.buffers()[1]
    if buffer is None or len(array) == 0:
        return np.empty(0, dtype)
    address = buffer.address + array.offset * dtype.itemsize
    return np.asarray(_Memory(buffer, address, len(array), dtype.str))


def nulls_text(name: str, count: int, where: str = "") -> str:
    """What to say about nulls in a column.

    ``where`` says in which rows they were counted, if not in all.
    """
    return (
        f"column {name!r} holds {count} null{'s' if count != 1 else ''}{where}: fill them (df.fillna) or drop those "
        "rows (df.dropna); an estimator's preprocess=fn takes features with nulls, and a reader fills or drops them "
        "itself with fill_nulls= or drop_nulls="
    )


def inner_nulls_text(name: str, count: int, where: str = "") -> str:
    """What to say about nulls inside the lists of a column."""
    return (
        f"column {name!r} holds {count} null{'s' if count != 1 else ''} inside its lists{where} (in pandas, NaN is "
        "one): put numbers in their places, or drop those rows"
    )


def ragged_text(name: str, one: int, other: int, where: str = "") -> str:
    """What to say about lists of unequal length in a column."""
    return f"column {name!r} holds lists of different lengths, {one} and {other}{where}: pad or cut them to one length"
