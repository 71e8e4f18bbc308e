"""Arrow columns as the NumPy columns that petastorm's readers return.

Without a Python loop where the type allows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_cluster.data.columns.arrow_values import is_list, is_text
from hvd_cluster.data.optional import load_pyarrow
from hvd_cluster.petastorm.codecs import CompressedImageCodec, CompressedNdarrayCodec, NdarrayCodec, ScalarCodec
from hvd_cluster.petastorm.spark_types import StringType
from hvd_cluster.petastorm.unischema_field import UnischemaField, is_decimal

#: n values: an array of n rows, or a list where they are not numbers of one shape.
Values = npt.NDArray[Any] | list[Any]


#: Their values are arrays for certain.
_ARRAY_CODECS = {NdarrayCodec, CompressedNdarrayCodec, CompressedImageCodec}
#: Decodes the values of fields without a codec, by their dtype.
_ANY_SCALAR = ScalarCodec(StringType())


def decoded(array: Any, field: UnischemaField) -> Values:
    """A column of a petastorm data set, decoded.

    Returns:
        An array of shape (n, ...) where the values are numbers, times or bools without nulls; else a list of n
        scalars, arrays, str, bytes, ``Decimal`` or None. Floating-point nulls are NaN.
    """
    codec = field.codec
    array = _combined(array)
    if codec is None and (field.shape or load_pyarrow("pyarrow.types").is_nested(array.type)):
        return plain(array)
    if codec is not None and type(codec) is not ScalarCodec:
        values = [None if value is None else codec.decode(field, value) for value in array.to_pylist()]
        return _stacked(values) if type(codec) in _ARRAY_CODECS else values
    return _scalars(array, field)


def _stacked(values: list[Any]) -> Values:
    """Arrays of one shape as one array; else as they are."""
    if not values or any(value is None for value in values) or values[0].dtype.kind not in "biufc":
        return values
    shape, dtype = values[0].shape, values[0].dtype
    if any(value.shape != shape or value.dtype != dtype for value in values):
        return values
    return np.stack(values)


def _scalars(array: Any, field: UnischemaField) -> Values:
    """Scalars, in the field's dtype."""
    pyarrow, types = load_pyarrow(), load_pyarrow("pyarrow.types")
    if types.is_dictionary(array.type):
        array = array.dictionary_decode()
    floating = not is_decimal(field) and np.dtype(field.numpy_dtype).kind == "f"
    if array.null_count and floating and (types.is_floating(array.type) or types.is_integer(array.type)):
        array = array.cast(pyarrow.float64() if types.is_integer(array.type) else array.type)
        array = array.fill_null(float("nan"))
    kind = "O" if is_decimal(field) else np.dtype(field.numpy_dtype).kind
    numeric = types.is_integer(array.type) or types.is_floating(array.type) or types.is_boolean(array.type)
    if not array.null_count and numeric and kind in "biufc":
        return _owned(array).astype(field.numpy_dtype, copy=False)
    if kind == "M" and (types.is_timestamp(array.type) or types.is_date(array.type)):
        moments = _moments(array)
        if types.is_timestamp(array.type):  # as petastorm gives them, whatever unit the file has
            moments = moments.astype("datetime64[us]")
        return moments if not array.null_count else [None if np.isnat(moment) else moment for moment in moments]
    codec = field.codec or _ANY_SCALAR
    return [None if value is None else codec.decode(field, value) for value in array.to_pylist()]


def plain(array: Any) -> npt.NDArray[Any]:
    """A column of a data set without petastorm's metadata.

    Returns:
        Shape (n,) or, for lists of equal lengths, (n, length, ...), in memory of its own. Integers with nulls become
        float64, with NaN; bools with nulls, texts with nulls, bytes, decimals and dates are objects; texts without
        nulls are of NumPy's ``str_``. Lists of unequal lengths, or with nulls, are n objects: arrays, or None.
    """
    types = load_pyarrow("pyarrow.types")
    array = _combined(array)
    if types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if is_list(types, array.type):
        return _lists(array)
    if types.is_boolean(array.type) or types.is_integer(array.type) or types.is_floating(array.type):
        if not array.null_count:
            return _owned(array)
        return np.array(array.to_numpy(zero_copy_only=False))
    if types.is_timestamp(array.type):
        return _moments(array)
    values = array.to_pylist()
    if is_text(array.type) and not array.null_count:
        return np.array(values, dtype=np.str_)
    return objects(values)


def objects(values: Sequence[Any]) -> npt.NDArray[Any]:
    """n values of any kind as an array of n objects."""
    array = np.empty(len(values), dtype=object)
    for index, value in enumerate(values):  # a slice assignment would take arrays apart
        array[index] = value
    return array


def _lists(array: Any) -> npt.NDArray[Any]:
    compute, types = load_pyarrow("pyarrow.compute"), load_pyarrow("pyarrow.types")
    lengths = compute.unique(compute.list_value_length(array)).to_pylist()
    if array.null_count or len(lengths) > 1 or not len(array):
        if not len(array):
            return np.empty((0, 0), dtype=object)
        return objects([None if not item.is_valid else plain(item.values) for item in array])
    values = plain(array.flatten())
    if values.dtype == object and types.is_nested(array.type.value_type):
        return objects([plain(item.values) for item in array])
    return values.reshape(len(array), lengths[0], *values.shape[1:])


def _combined(array: Any) -> Any:
    """One array of chunks."""
    pyarrow = load_pyarrow()
    if not isinstance(array, pyarrow.ChunkedArray):
        return array
    if array.num_chunks == 1:
        return array.chunk(0)
    # pyarrow before 18 gives a chunked array back for some types.
    joined = array.combine_chunks()
    return joined.chunk(0) if isinstance(joined, pyarrow.ChunkedArray) and joined.num_chunks else joined


def _moments(array: Any) -> npt.NDArray[Any]:
    """Times as datetime64 of their own unit, days as datetime64[D]; NaT for null."""
    pyarrow, types = load_pyarrow(), load_pyarrow("pyarrow.types")
    nulls = np.asarray(array.is_null().to_numpy(zero_copy_only=False), dtype=bool)
    if types.is_timestamp(array.type):
        unit, counts = array.type.unit, array.cast(pyarrow.int64())
    else:
        unit, counts = "D", array.cast(pyarrow.date32()).cast(pyarrow.int32())
    numbers = np.array(counts.fill_null(0).to_numpy(zero_copy_only=False), dtype=np.int64)
    moments = numbers.view(f"datetime64[{unit}]")
    moments[nulls] = np.datetime64("NaT")
    return moments


def _owned(array: Any) -> npt.NDArray[Any]:
    """An Arrow array's values in memory that may be written to."""
    numbers: npt.NDArray[Any] = array.to_numpy(zero_copy_only=False)
    return numbers if numbers.flags.writeable else numbers.copy()
