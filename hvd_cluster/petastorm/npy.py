"""NumPy's .npy format between bytes and arrays.

The header of one shape is parsed once.
"""

from __future__ import annotations

import functools
import io
import math
from typing import Any

import numpy as np
import numpy.typing as npt

_MAGIC = b"\x93NUMPY"


def dump(array: npt.NDArray[Any]) -> bytes:
    """An array as the content of a .npy file."""
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=False)
    return stream.getvalue()


def load(data: bytes) -> npt.NDArray[Any]:
    """The array of a .npy file's content, in memory of its own.

    Raises:
        ValueError: it is cut short, or no .npy at all, or holds Python objects.
    """
    if data[:6] != _MAGIC or len(data) < 12:
        raise ValueError("it does not begin as an array of NumPy's does")
    start = 10 if data[6] == 1 else 12  # version 1 has two bytes for the header's length, later ones four
    end = start + int.from_bytes(data[8:start], "little")
    if end > len(data):
        raise ValueError("its header is cut short")
    shape, fortran_order, dtype = _header(data[:end])
    count = math.prod(shape)
    if len(data) - end < count * dtype.itemsize:
        raise ValueError(f"it is cut short: {len(data) - end} bytes for {count} elements of {dtype}")
    if dtype.itemsize == 0:
        return np.zeros(shape, dtype)
    flat = np.frombuffer(data, dtype, count=count, offset=end)
    return flat.reshape(shape, order="F" if fortran_order else "C").copy(order="K")


@functools.lru_cache(maxsize=256)
def _header(header: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """(shape, whether in Fortran's order, dtype) of a header.

    Found by NumPy's own parser, which evaluates literals only.
    """
    stream = io.BytesIO(header)
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran_order, dtype = read(stream)
    if dtype.hasobject:
        raise ValueError("it holds Python objects, which could run code")
    if any(length < 0 for length in shape):
        raise ValueError(f"its shape is {shape}")
    return shape, fortran_order, dtype
