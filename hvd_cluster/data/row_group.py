"""The unit in which rows are read and divided: a fragment of a table."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hvd_cluster.data.reading.hive import Partition


@dataclass(frozen=True)
class RowGroup:
    """Rows of one fragment of a table, such as a row group of a file.

    They are all of it, or one contiguous piece.
    """

    #: Path of the file inside the store's filesystem.
    path: str
    #: Index of the row group in the file.
    index: int
    #: Number of rows meant, >= 1; only live ones that the split's filter lets through.
    rows: int
    #: The first row meant, counted from the row group's own first row.
    start: int = 0
    #: Bytes of these rows in memory, as Arrow data; 0 when not known.
    size_bytes: int = 0
    #: Columns that have one value in the whole file, such as those that its folders name (``key=value``).
    partition: Partition = ()
    #: Rows of the whole row group in the file, which has to be read for these; 0 where they are all of it.
    whole_rows: int = 0
    #: Column -> its name in the file, where that differs.
    stored_names: tuple[tuple[str, str], ...] = ()
    #: Which rows of the row group are deleted, as :func:`pack_deleted` returns them.
    deleted: bytes = b""
    #: Of a file that is written for one fit and removed after it: the row of the user's data that is the file's first
    #: row in this row group, -1 where that is not known. None for a file that stays.
    source_row: int | None = field(default=None, compare=False)

    @property
    def place(self) -> str:
        """Where the rows are, for messages."""
        return f"row group {self.index} of {self.path}"

    def place_of(self, row: int) -> str:
        """Where a row is, counted from the row group's own first row, for messages."""
        if self.source_row is None:
            return f"row {row} of {self.place}"
        if self.source_row < 0:
            return f"row {row} of row group {self.index} of the data that was written for this fit"
        return f"row {self.source_row + row} of the data"

    @property
    def read_bytes(self) -> int:
        """Bytes that reading these rows takes; 0 when not known.

        They are those of the whole row group.
        """
        return self.size_bytes * max(self.rows, self.whole_rows) // self.rows


def pack_deleted(positions: npt.NDArray[np.int64], rows: int) -> bytes:
    """A row group's deleted rows, as a few bytes that travel with it to the workers.

    Args:
        positions: row numbers below ``rows``, in any order.
        rows: of the row group.
    """
    if not len(positions):
        return b""
    deleted = np.zeros(rows, dtype=bool)
    deleted[positions] = True
    return zlib.compress(np.packbits(deleted).tobytes())


def live_rows(deleted: bytes, rows: int) -> npt.NDArray[np.bool_]:
    """For each row of a row group whether it is live; shape (rows,)."""
    if not deleted:
        return np.ones(rows, dtype=bool)
    bits = np.frombuffer(zlib.decompress(deleted), dtype=np.uint8)
    return ~np.unpackbits(bits, count=rows).astype(bool)
