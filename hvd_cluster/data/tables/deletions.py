"""Which rows of a row group are deleted, as a few bytes that travel with it to the workers."""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt


def pack(positions: npt.NDArray[np.int64], rows: int) -> bytes:
    """A row group's deleted rows.

    Args:
        positions: row numbers below ``rows``, in any order.
        rows: of the row group.
    """
    if not len(positions):
        return b""
    deleted = np.zeros(rows, dtype=bool)
    deleted[positions] = True
    return zlib.compress(np.packbits(deleted).tobytes())


def kept(deleted: bytes, rows: int) -> npt.NDArray[np.bool_]:
    """For each row of a row group whether it is live; shape (rows,)."""
    if not deleted:
        return np.ones(rows, dtype=bool)
    bits = np.frombuffer(zlib.decompress(deleted), dtype=np.uint8)
    return ~np.unpackbits(bits, count=rows).astype(bool)
