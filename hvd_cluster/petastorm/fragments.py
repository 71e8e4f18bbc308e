"""What a reader distributes: row groups, or slices, from the files' footers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from hvd_cluster.data.filters import RowFilter
from hvd_cluster.data.reading.hive import folders_above
from hvd_cluster.data.reading.parquet_files import files_at
from hvd_cluster.data.row_group import RowGroup
from hvd_cluster.data.tables.parquet import ParquetFolder
from hvd_cluster.data.tables.table_source import TableSource
from hvd_cluster.errors import DataError
from hvd_cluster.petastorm.location import Location


@dataclass(frozen=True)
class Fragment:
    """Rows of one row group: all, or one of ``num_slices`` contiguous parts."""

    #: The whole row group.
    row_group: RowGroup
    #: Number of the row group over all files in the order of their names.
    number: int
    #: Which of how many parts of the row group.
    slice: int = 0
    num_slices: int = 1

    @property
    def bounds(self) -> tuple[int, int]:
        """First row, and one past the last."""
        rows = self.row_group.rows
        return rows * self.slice // self.num_slices, rows * (self.slice + 1) // self.num_slices

    @property
    def size_bytes(self) -> int:
        """Bytes of the columns that are read, in memory."""
        return self.row_group.size_bytes // self.num_slices


def fragments_of(
    table: TableSource, columns: Sequence[str], row_filter: RowFilter | None, num_slices: int = 1
) -> list[Fragment]:
    """All row groups that may have rows which a filter lets through.

    They come in the table's order: that of the files' names.

    Args:
        table: the files, or a table of another format.
        columns: the columns that will be read, which sizes count.
        row_filter: decides by folders and footers; None for all row groups.
        num_slices: parts to cut each row group into.
    """
    if row_filter is not None:
        table.require(row_filter.names)
    groups = table.fragments(columns)
    numbers: Sequence[int] = range(len(groups))
    if isinstance(table, ParquetFolder):  # the numbers of an index count row groups without rows too
        counts = (footer.num_row_groups for footer in table.footers.values())
        first_numbers = dict(zip(table.paths, itertools.accumulate(counts, initial=0), strict=False))
        numbers = [first_numbers[group.path] + group.index for group in groups]
    return [
        Fragment(group, number, index, min(num_slices, group.rows))
        for group, number in zip(groups, numbers, strict=True)
        if row_filter is None or row_filter.verdict(table.statistics(group, row_filter.names)) is not False
        for index in range(min(num_slices, group.rows))
    ]


def parquet_files(location: Location) -> list[tuple[str, str]]:
    """The Parquet files, sorted, each with its path below the folder.

    The first path is the one inside the filesystem. Of a listed file the latter is its name, and the ``key=value``
    folders directly above it.
    """
    found = parquet_files_if_any(location)
    if not found:
        raise DataError(f"there is no Parquet at {location.text!r}: no file there ends in .parquet")
    return found


def parquet_files_if_any(location: Location) -> list[tuple[str, str]]:
    """As :func:`parquet_files`; [] where there are none."""
    found: list[tuple[str, str]] = []
    checked: set[str] = set()
    for path in location.paths:
        try:
            files, _ = files_at(location.filesystem, path, checked)
        except OSError as error:
            raise DataError(f"cannot look at {location.text}: {error}") from error
        above = folders_above(path, "") if len(location.paths) > 1 else ""
        found += [(file, below or above + path.rsplit("/", 1)[-1]) for file, below in files]
    return sorted(found)
