"""What only the user knows about columns: shapes, padding, nulls, decoding."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_cluster.data.columns.arrays import flat_lists
from hvd_cluster.data.columns.arrow_values import inner_nulls_text, is_list, list_depth, list_lengths, view
from hvd_cluster.data.optional import load_pyarrow
from hvd_cluster.data.schema import UNKNOWN, Column, ColumnKind, Schema
from hvd_cluster.errors import DataError

#: Takes one value of a column (str, bytes, or whatever Python has for its type), returns a number, array or tensor;
#: see :mod:`hvd_cluster.data.reading.decoding`.
Decode = Callable[[Any], Any]


@dataclass(frozen=True, kw_only=True)
class ColumnConfig:
    """How columns become tensors.

    Columns that no field names are read as they are stored. ``ParquetReader(...,
    column_config=ColumnConfig(shapes={"tokens": (128,)}, pad={"tokens": 0}))``

    Args:
        shapes: column -> shape of one row, for lists with this many elements in all.
        pad: column -> number that pads lists shorter than the shape; longer lists are truncated.
        fill_nulls: column -> value in place of nulls, also inside lists. Other nulls are an error that names the
            column.
        drop_nulls: columns whose nulls drop the row; True for all columns.
        decode: column -> function from one value (str, bytes, ...) to a number, array or tensor of the same shape and
            dtype for all rows; see :class:`hvd_cluster.data.reading.decoding.RawTensor`.
        stack: name of a tensor -> the columns of one dtype and shape that it holds, instead of a tensor for each of
            them. Its shape is ``(rows, number of columns, *shape of a column)``. For small batches of many columns:
            each tensor of a batch takes as much time as 10 rows.

    Raises:
        DataError: a rule is not a dict.
    """

    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    pad: Mapping[str, Any] = field(default_factory=dict)
    fill_nulls: Mapping[str, Any] = field(default_factory=dict)
    drop_nulls: bool | Collection[str] = False
    decode: Mapping[str, Decode] = field(default_factory=dict)
    stack: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise a DataError that names all rules that are not dicts."""
        values = {rule: getattr(self, rule) for rule in ("shapes", "pad", "fill_nulls", "decode", "stack")}
        if wrong := {rule: value for rule, value in values.items() if not isinstance(value, Mapping)}:
            raise DataError(
                "\n".join(
                    f"{rule} is {value!r}: give a dict with the names of columns" for rule, value in wrong.items()
                )
            )

    def applied(self, schema: Schema) -> Schema:
        """The schema with the declared shapes.

        Raises:
            DataError: a rule names no column, or does not fit what its column holds; all such are named at once.
        """
        problems = [
            f"{rule} names the column {name!r}, which is not read: the columns are {', '.join(map(repr, schema.names))}"
            for rule in ("shapes", "pad", "fill_nulls", "decode")
            for name in getattr(self, rule)
            if name not in schema
        ]
        columns = []
        for column in schema:
            problems += self._problems(column)
            shape = self.shapes.get(column.name)
            columns.append(column if shape is None else dataclasses.replace(column, shape=tuple(shape)))
        if problems:
            raise DataError("\n".join(problems))
        return Schema(tuple(columns))

    def stacked(self, schema: Schema) -> Schema:
        """The schema of batches, from the columns that they are made of.

        A stack comes where its first column was.

        Raises:
            DataError: a stack does not consist of columns of one dtype and shape, or takes another column's name.
        """
        of = {name: stack for stack, names in self.stack.items() for name in names}
        columns: dict[str, Column] = {}
        for stack, names in self.stack.items():
            found = [schema[name] for name in names]
            kinds = {(column.dtype, column.shape) for column in found}
            if len(kinds) != 1 or len(set(names)) < len(names) or any(of[name] != stack for name in names):
                held = ", ".join(f"{column.name!r} of {column.dtype} {column.shape}" for column in found)
                raise DataError(
                    f"stack={{{stack!r}: ...}} holds {held or 'no columns'}: give columns of one dtype and shape, each "
                    "once; cast the others where the data is written"
                )
            if stack in schema:
                raise DataError(f"stack: {stack!r} is the name of another column: choose another name")
        for column in schema:
            stack = of.get(column.name, "")
            if not stack:
                columns[column.name] = column
            elif stack not in columns:
                shape = (len(self.stack[stack]), *column.shape)
                columns[stack] = dataclasses.replace(column, name=stack, kind=ColumnKind.LIST, shape=shape)
        return Schema(tuple(columns.values()))

    def _problems(self, column: Column) -> list[str]:
        name, shape = column.name, self.shapes.get(column.name)
        texts = []
        if shape is not None and (
            column.kind not in {ColumnKind.LIST, ColumnKind.VECTOR} or any(length < 1 for length in shape)
        ):
            texts.append(
                f"shapes gives column {name!r}, which holds {column.kind.value}, the shape {tuple(shape)}: shapes are "
                "for lists and vectors, and their lengths are at least 1; a decode function returns arrays in shape"
            )
        if name in self.pad and (column.kind is not ColumnKind.LIST or len(column.shape) != 1 or len(shape or ()) != 1):
            texts.append(
                f"pad names column {name!r} of shape {column.shape}: it is for lists of numbers, whose length shapes "
                f"declares, e.g. shapes={{{name!r}: (128,)}}"
            )
        if name in self.fill_nulls and column.kind is ColumnKind.LIST and shape is None and UNKNOWN in column.shape:
            texts.append(f"fill_nulls names column {name!r}, whose null lists have no length: declare it with shapes")
        return texts

    def prepared(self, array: Any, column: Column) -> Any:
        """An Arrow array with its nulls filled and its lists padded.

        Nested lists become flat for a shape.
        """
        types = load_pyarrow("pyarrow.types")
        if column.name in self.fill_nulls:
            array = _without_view(array)
        if column.name in self.fill_nulls and array.null_count and not is_list(types, array.type):
            array = _filled(array, column.name, self.fill_nulls[column.name])
        if is_list(types, array.type) and (column.name in self.pad or column.name in self.fill_nulls):
            array = self._even_lists(array, column)
        is_shaped = column.name in self.shapes and column.name not in self.decode
        return flat_lists(array, column) if is_shaped and list_depth(array.type) > 1 else array

    def _even_lists(self, array: Any, column: Column) -> Any:
        """Lists without nulls; of one length, where they are to be padded."""
        pyarrow = load_pyarrow()
        name, fill, pad = column.name, self.fill_nulls.get(column.name), self.pad.get(column.name)
        values = array.flatten()  # without what stands behind null lists
        if values.null_count and fill is None:
            raise DataError(inner_nulls_text(name, values.null_count))
        if list_depth(array.type) > 1:
            if array.null_count or values.null_count:
                raise DataError(
                    f"column {name!r} holds nulls in nested lists, which fill_nulls cannot replace: drop them"
                )
            return array
        if pyarrow.types.is_decimal(values.type):
            values = values.cast("float64")  # which their tensors hold; NumPy has no such numbers
        fill = None if fill is None else _fitting(fill, values.type, name, "fill_nulls").as_py()
        pad = fill if name not in self.pad else _fitting(pad, values.type, name, "pad").as_py()
        if values.null_count:
            values = values.fill_null(fill)
        if array.null_count and fill is None:
            return array  # the reader says that there are nulls
        lengths, length = list_lengths(array), math.prod(column.shape)
        missing = np.asarray(array.is_null().to_numpy(zero_copy_only=False), dtype=np.bool_)
        if name not in self.pad and not missing.any():
            return _relisted(array, values)
        if name not in self.pad and not (lengths[~missing] == length).all():
            return _relisted(array.drop_null(), values)  # the reader says that they are ragged
        numbers = view(values.cast("uint8")) if values.type == pyarrow.bool_() else view(values)
        rows = padded(numbers, lengths, length, pad)
        if missing.any():
            rows[missing] = fill
        flat = pyarrow.array(rows.reshape(-1)).cast(values.type)
        return pyarrow.FixedSizeListArray.from_arrays(flat, length)


def padded(values: npt.NDArray[Any], lengths: npt.NDArray[np.int64], length: int, value: Any) -> npt.NDArray[Any]:
    """Lists of any lengths as a matrix, without a Python loop over rows.

    Args:
        values: the elements of all lists, one list after the other; shape (sum(lengths),).
        lengths: shape (n,).
        length: columns of the matrix: longer lists are cut.
        value: what stands behind the end of shorter ones.

    Returns:
        Shape (n, length), of the dtype of ``values``.
    """
    rows = np.full((len(lengths), length), value, dtype=values.dtype)
    inside = np.arange(length) < lengths[:, None]
    if len(lengths) and lengths.max() > length:
        ends = np.cumsum(lengths)[lengths > length]
        change = np.zeros(len(values) + 1, dtype=np.int8)  # small beside the values
        change[ends - lengths[lengths > length] + length] = -1
        change[ends] = 1
        values = values[np.cumsum(change[:-1], dtype=np.int8) == 0]
    rows[inside] = values
    return rows


def _without_view(array: Any) -> Any:
    """Arrow's views of text or bytes as large strings or bytes.

    Few of Arrow's functions take views.
    """
    plain = {"string_view": "large_string", "binary_view": "large_binary"}.get(str(array.type))
    return array if plain is None else array.cast(plain)


def _filled(array: Any, name: str, value: Any) -> Any:
    pyarrow = load_pyarrow()
    try:
        if pyarrow.types.is_null(array.type):  # what a folder named null
            return pyarrow.repeat(pyarrow.scalar(value), len(array))
        if pyarrow.types.is_dictionary(array.type):
            more = pyarrow.array([value], type=array.type.value_type)
            indices = array.indices.fill_null(len(array.dictionary))
            return pyarrow.DictionaryArray.from_arrays(indices, pyarrow.concat_arrays([array.dictionary, more]))
    except (pyarrow.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise DataError(_unfit_text("fill_nulls", name, array.type, value, error)) from error
    return array.fill_null(_fitting(value, array.type, name, "fill_nulls"))


def _fitting(value: Any, arrow_type: Any, name: str, rule: str) -> Any:
    """A rule's value as an Arrow scalar of a column's type, the same number."""
    pyarrow = load_pyarrow()
    try:
        if value is None:
            raise ValueError("a null is not a value")
        if pyarrow.types.is_decimal(arrow_type) and isinstance(value, float):
            return pyarrow.scalar(Decimal(str(value))).cast(arrow_type)  # the cast of a float would round it
        return pyarrow.scalar(value).cast(arrow_type)
    except (pyarrow.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise DataError(_unfit_text(rule, name, arrow_type, value, error)) from error


def _unfit_text(rule: str, name: str, arrow_type: Any, value: Any, error: Exception) -> str:
    return f"{rule} gives column {name!r} of {arrow_type} the value {value!r}: {error}"


def _relisted(array: Any, values: Any) -> Any:
    """The lists with other elements, as many as before."""
    pyarrow = load_pyarrow()
    lengths = list_lengths(array)
    offsets = pyarrow.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
    return pyarrow.LargeListArray.from_arrays(offsets, values)
