"""Text, compressed images and raw bytes -> tensors, by the user's functions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hvd_cluster.data.columns.arrow_values import is_variable_bytes, nulls_text, python_values
from hvd_cluster.data.columns.column_config import Decode
from hvd_cluster.data.optional import load_pyarrow
from hvd_cluster.data.reading.row_transform import as_array, as_dtype, call_decode, column_of_value, in_dtype_of_first
from hvd_cluster.data.schema import Column
from hvd_cluster.errors import DataError


class RawTensor:
    """A decode function for binary columns that hold the bytes of arrays.

    The bytes are little-endian, in C order. The reader decodes whole columns of it at once.

    Args:
        dtype: numpy name of an element, e.g. "uint8".
        shape: shape of one value.
    """

    def __init__(self, dtype: str, shape: Sequence[int]) -> None:
        self.dtype = np.dtype(dtype)
        self.shape = tuple(shape)

    def __call__(self, value: bytes) -> npt.NDArray[Any]:
        """One value; shape ``self.shape``."""
        return np.frombuffer(value, self.dtype).reshape(self.shape)

    def all(self, array: Any, name: str, where: Callable[[int], str]) -> npt.NDArray[Any]:
        """All values of a binary ``pyarrow.Array``; shape (n, *self.shape).

        Its type is binary, large binary or fixed-size binary.
        """
        types = load_pyarrow("pyarrow.types")
        if types.is_dictionary(array.type):
            array = array.dictionary_decode()
        num_bytes = math.prod(self.shape) * self.dtype.itemsize
        if types.is_fixed_size_binary(array.type):
            lengths, start = np.array([array.type.byte_width]), array.offset * array.type.byte_width
        elif is_variable_bytes(array.type):
            lengths = np.asarray(load_pyarrow("pyarrow.compute").binary_length(array).to_numpy(), dtype=np.int64)
            offset_bytes = 8 if types.is_large_binary(array.type) else 4
            start = int.from_bytes(array.buffers()[1][array.offset * offset_bytes :][:offset_bytes], "little")
        else:
            raise DataError(f"column {name!r} holds {array.type}: RawTensor decodes binary columns only")
        wrong = np.flatnonzero(lengths != num_bytes)
        if len(wrong):
            raise DataError(
                f"column {name!r} holds a value of {int(lengths[wrong[0]])} bytes in {where(int(wrong[0]))}, but "
                f"{self.dtype.name} of shape {self.shape} takes {num_bytes}"
            )
        data = np.frombuffer(array.buffers()[-1], np.uint8, count=len(array) * num_bytes, offset=start)
        return data.view(self.dtype).reshape((len(array), *self.shape))


def first_column(name: str, fn: Decode, values: Any, where: str) -> Column:
    """The column that a decode function makes, learned from the first of some values.

    Raises:
        DataError: it is null, or the function failed or returned what no tensor can be made of.
    """
    if isinstance(fn, RawTensor):
        return column_of_value(name, np.zeros(fn.shape, fn.dtype), where, "RawTensor")
    first = values.slice(0, 1)
    if first.null_count:
        raise DataError(nulls_text(name, 1, f" in {where}"))
    value = call_decode(fn, first.to_pylist()[0], name, where)
    return column_of_value(name, value, where, "the decode function")


def decoded(
    column: Column,
    fn: Decode,
    values: Any,
    where: Callable[[int], str],
    stopped: Callable[[], bool] = lambda: False,
) -> torch.Tensor:
    """All values of a column as a tensor.

    Args:
        column: what the function makes, as :func:`first_column` found it.
        fn: the function.
        values: ``pyarrow.ChunkedArray`` of n values.
        where: the place of value i, for messages.
        stopped: asked before each value; when true, what follows is left undecoded.

    Returns:
        Shape (n, *column.shape), of memory that is not shared.

    Raises:
        DataError: there are nulls, the function failed (its exception is the cause), or a value does not fit.
    """
    if values.null_count:
        raise DataError(nulls_text(column.name, values.null_count))
    if isinstance(fn, RawTensor):
        begins = itertools.accumulate((len(chunk) for chunk in values.chunks), initial=0)
        parts = [
            fn.all(chunk, column.name, lambda index, begin=begin: where(begin + index))  # type: ignore[misc]
            for chunk, begin in zip(values.chunks, begins, strict=False)
        ]
        raw = np.concatenate(parts)
        found = as_dtype(raw, column.dtype)
        if found is None:
            place = where(int(np.argwhere(raw > np.iinfo(column.dtype).max)[0][0]))
            raise DataError(
                f"column {column.name!r} holds an integer in {place} that {column.dtype} cannot hold: decode it with a "
                "function that returns floating-point numbers"
            )
        return torch.from_numpy(found)
    rows = np.empty((len(values), *column.shape), dtype=column.dtype)
    for index, value in enumerate(itertools.chain.from_iterable(map(python_values, values.chunks))):
        if stopped():
            break
        array = as_array(call_decode(fn, value, column.name, where(index)))
        fits = array.dtype.kind in "biuf" and np.can_cast(array.dtype, column.dtype, casting="same_kind")
        if array.shape != column.shape or not fits:
            raise DataError(
                f"the decode function of column {column.name!r} returned shape {array.shape} and dtype {array.dtype} "
                f"for {where(index)}, but shape {column.shape} and dtype {column.dtype} for the first row"
            )
        rows[index] = in_dtype_of_first(array, column, "the decode function", where(index))
    return torch.from_numpy(rows)
