"""Parquet files as they lie: which ones a folder holds, their footers, and what a footer tells of a row group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hvd_cluster.data.files.retry import retried
from hvd_cluster.data.filters import Statistics
from hvd_cluster.data.optional import load_pyarrow
from hvd_cluster.data.reading.hive import Partition
from hvd_cluster.errors import DataError

#: Footers, and columns that a filter looks at, are read by this many threads: they are small, and far away on object
#: stores.
NUM_THREADS = 8
_SUFFIXES = (".parquet", ".parq", ".pq")


def among(found: Iterable[Any], folder: str) -> list[tuple[str, str]]:
    """The Parquet files of a listing, sorted: path inside the filesystem, and path relative to the folder.

    Names that begin with "_" or "." are passed over, unless they name a column (``_year=2024``), as in Spark.

    Args:
        found: ``pyarrow.fs.FileInfo`` of all that is below the folder.
        folder: its path inside the filesystem.
    """
    file_type = load_pyarrow("pyarrow.fs").FileType.File
    files = [(info.path, info.path[len(folder) :].strip("/")) for info in found if info.type == file_type]
    return sorted((path, below) for path, below in files if path.endswith(_SUFFIXES) and not _is_hidden(below))


def _is_hidden(below: str) -> bool:
    return any(part[0] in "_." and "=" not in part for part in below.split("/"))


def footer_of(filesystem: Any, path: str) -> Any:
    """The footer of a Parquet file, a ``pyarrow.parquet.FileMetaData``.

    Raises:
        DataError: it cannot be read, or is none.
    """
    parquet = load_pyarrow("pyarrow.parquet")

    def read() -> Any:
        with filesystem.open_input_file(path) as stream:
            return parquet.read_metadata(stream)

    try:
        return retried(read, filesystem, f"reading the footer of {path}")
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is not a whole Parquet file: {error}") from error


def leaves_of(footer: Any, names: Iterable[str]) -> dict[str, list[int]]:
    """For each named column the indices of the Parquet columns (leaves) that it is made of."""
    leaves: dict[str, list[int]] = {name: [] for name in names}
    for index in range(footer.num_columns):
        leaf = footer.schema.column(index).path
        # A column's name may hold dots itself.
        while leaf and leaf not in leaves:
            leaf = leaf.rpartition(".")[0]
        if leaf:
            leaves[leaf].append(index)
    return leaves


def statistics_of(
    footer: Any, row_group: int, partition: Partition, names: Sequence[str]
) -> Callable[[str], Statistics]:
    """What a footer and its file's folders tell of the named columns in a row group.

    Args:
        footer: the file's.
        row_group: its index in the file.
        partition: columns that the file's folders name, and their values.
        names: the columns that will be asked for.
    """
    group, leaves, constants = footer.row_group(row_group), leaves_of(footer, names), dict(partition)
    rows = group.num_rows

    def of(name: str) -> Statistics:
        if name in constants:
            value = constants[name]
            return Statistics(rows=rows, nulls=rows if value is None else 0, low=value, high=value)
        found = group.column(leaves[name][0]).statistics if len(leaves[name]) == 1 else None
        if found is None or group.column(leaves[name][0]).path_in_schema != name:
            return Statistics(rows=rows)
        low, high = (found.min, found.max) if found.has_min_max else (None, None)
        nulls = found.null_count if found.has_null_count else None
        return Statistics(rows=rows, nulls=nulls, low=low, high=high)

    return of
