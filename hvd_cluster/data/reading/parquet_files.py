"""Parquet files: those of a folder, their footers, and their row groups."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from hvd_cluster.data.files.filesystems import is_local
from hvd_cluster.data.files.retry import file_info, retried
from hvd_cluster.data.filters import Statistics
from hvd_cluster.data.optional import load_pyarrow
from hvd_cluster.data.reading import hive
from hvd_cluster.errors import DataError

#: Threads that read footers, and the columns of a filter: each is small, and an object store answers slowly.
NUM_THREADS = 8
_SUFFIXES = (".parquet", ".parq", ".pq")
#: A file whose name begins so in a folder says that its data is still being written, or that the writer died.
INCOMPLETE = "_INCOMPLETE"
#: A file of this name says that the data is complete.
SUCCESS = "_SUCCESS"
#: The unit of timestamps that are stored as INT96, which is Spark's own: nanoseconds wrap before 1677 and after 2262.
INT96_UNIT = "us"

#: Table format -> how its current rows become a DataFrame.
_TABLE_READERS = {
    "Delta": "spark.read.format('delta').load({path!r}) or deltalake.DeltaTable({path!r}).to_pandas()",
    "Iceberg": "spark.read.format('iceberg').load({path!r}) or pyiceberg's Table.scan().to_arrow()",
    "Paimon": "spark.read.format('paimon').load({path!r})",
    "Hudi": "spark.read.format('hudi').load({path!r})",
    "Lance": "lance.dataset({path!r}).to_table()",
}
#: A folder of this name directly in a table's folder -> the table's format.
_TABLE_FOLDERS = {"_delta_log": "Delta", ".hoodie": "Hudi", "_versions": "Lance"}
#: A folder of this name in a table's folder, with files whose names match -> the table's format.
_TABLE_FILES = {
    "metadata": (re.compile(r".*(\.metadata\.json|\.avro)"), "Iceberg"),
    "schema": (re.compile(r"schema-\d+"), "Paimon"),
}


def require_plain(filesystem: Any, path: str, found: Iterable[Any] = (), checked: set[str] | None = None) -> None:
    """Refuse Parquet files of a Delta, Iceberg, Hudi, Lance or Paimon table.

    Such a table lists its current files elsewhere: its folder also holds files whose rows were deleted or replaced.

    Args:
        filesystem: the ``pyarrow.fs.FileSystem`` that serves the path.
        path: what will be read: the table's folder, a folder or file in it, a folder that holds tables, or a pattern.
        found: ``pyarrow.fs.FileInfo`` of all that is below the path.
        checked: folders that were checked already; the folders that this call checks are added.

    Raises:
        DataError: the table, and how to read it.
    """
    for root, table_format in _tables_in(found):
        raise DataError(_table_text(path, root, table_format))
    for root, table_format in tables_above(filesystem, path, set() if checked is None else checked):
        raise DataError(_table_text(path, root, table_format))


def tables_above(filesystem: Any, path: str, checked: set[str]) -> Iterator[tuple[str, str]]:
    """The folder and the format of each table that a path lies in.

    Looks only at folders that are not in ``checked``, and adds them to it.
    """
    folders = list(_with_folders_above(filesystem, path, checked))
    with ThreadPoolExecutor(NUM_THREADS) as pool:  # object stores are far away
        formats = pool.map(lambda folder: format_at(filesystem, folder), folders)
        for folder, found_format in zip(folders, formats, strict=True):
            if found_format is not None:
                yield folder or "/", found_format


def _table_text(path: str, root: str, table_format: str) -> str:
    how = _TABLE_READERS[table_format].format(path=root)
    return (
        f"{path!r} belongs to the {table_format} table in {root!r}: its files also hold rows that were deleted or "
        f"replaced, so they cannot be read as plain Parquet. Read the table, for example with {how}, and give the "
        "result to fit() or materialize()"
    )


def _tables_in(found: Iterable[Any]) -> Iterator[tuple[str, str]]:
    """Folder and format of the tables in a listing."""
    for info in found:
        *above, last = info.path.split("/")
        for depth, part in enumerate((*above, last)):
            if part in _TABLE_FOLDERS and (depth < len(above) or info.type.name == "Directory"):
                yield "/".join(above[:depth]), _TABLE_FOLDERS[part]
        pattern, table_format = _TABLE_FILES.get(above[-1] if above else "", (None, ""))
        if pattern is not None and pattern.fullmatch(last):
            yield "/".join(above[:-1]), table_format


def _with_folders_above(filesystem: Any, path: str, checked: set[str]) -> Iterator[str]:
    """The path and every folder above it, nearest first.

    Each comes as it is written and with its links resolved.
    """
    for spelling in [path, os.path.realpath(path)] if is_local(filesystem) else [path]:
        folder = spelling.rstrip("/")
        while folder not in checked:
            checked.add(folder)
            yield folder
            folder = folder.rpartition("/")[0]


def format_at(filesystem: Any, folder: str) -> str | None:
    """The format of the table whose folder this is; None if it is not a table's.

    A folder above the data may be closed to the user, or its filesystem may fail for missing names: it counts as none.
    """
    fs = load_pyarrow("pyarrow.fs")
    prefix = f"{folder}/" if folder else "/" if is_local(filesystem) else ""
    with suppress(OSError, ValueError):
        infos = filesystem.get_file_info([f"{prefix}{name}" for name in (*_TABLE_FOLDERS, *_TABLE_FILES)])
        for name, info in zip((*_TABLE_FOLDERS, *_TABLE_FILES), infos, strict=True):
            if info.type != fs.FileType.Directory:
                continue
            if name in _TABLE_FOLDERS:
                return _TABLE_FOLDERS[name]
            pattern, table_format = _TABLE_FILES[name]
            inside = filesystem.get_file_info(fs.FileSelector(info.path))
            if any(pattern.fullmatch(one.path.rpartition("/")[2]) for one in inside):
                return table_format
    return None


def files_at(filesystem: Any, path: str, checked: set[str]) -> tuple[list[tuple[str, str]], list[Any]]:
    """The Parquet files at a path, and the listing that they are from.

    Args:
        filesystem: the ``pyarrow.fs.FileSystem`` that serves the path.
        path: a file or folder inside it.
        checked: as :func:`require_plain` takes it.

    Returns:
        Sorted (path inside the filesystem, path relative to the folder, "" for a file), and the
        ``pyarrow.fs.FileInfo`` of all that is below the folder; both empty where nothing is there.

    Raises:
        DataError: the path belongs to a table of another format, or holds one; or its data is half-written.
        OSError: what the filesystem says.
    """
    fs = load_pyarrow("pyarrow.fs")
    if file_info(filesystem, path).type == fs.FileType.File:
        require_plain(filesystem, path.rpartition("/")[0], (), checked)
        return [(path, "")], []
    found = file_info(filesystem, fs.FileSelector(path, allow_not_found=True, recursive=True))
    require_plain(filesystem, path, found, checked)
    names = (info.path[len(path) :].strip("/").split("/")[0] for info in found)
    if any(name.split(".")[0] in {"_temporary", INCOMPLETE} for name in names):
        raise DataError(
            f"the data in {path!r} is still being written, or its writer died: delete it, and write it again"
        )
    files = [(info.path, info.path[len(path) :].strip("/")) for info in found if info.type == fs.FileType.File]
    return sorted((file, below) for file, below in files if file.endswith(_SUFFIXES) and not _is_hidden(below)), found


def _is_hidden(below: str) -> bool:
    """Whether a name begins with "_" or "." and is hidden, as in Spark.

    A name of a column (``_year=2024``) is not.
    """
    return any(part.startswith(("_", ".")) and "=" not in part for part in below.split("/"))


def files_of(
    filesystem: Any, paths: Sequence[str], *, listed: bool = False, checked: set[str] | None = None
) -> list[tuple[str, str]]:
    """The Parquet files at paths, each with its path in the data set's folder.

    The first path is the one inside the filesystem.

    Args:
        filesystem: the ``pyarrow.fs.FileSystem`` that serves the paths.
        paths: files or folders; in a folder, names that begin with "_" or "." are passed over.
        listed: the paths are some of the files and folders of a data set: ``key=value`` folders that they lie in, one
            directly below the other, count too.
        checked: as :func:`require_plain` takes it.

    Raises:
        DataError: there is no Parquet, it is half-written, or it belongs to a table of another format.
    """
    checked = set() if checked is None else checked
    return [
        (file, f"{hive.folders_above(file, below)}{below}" if listed else below)
        for path in paths
        for file, below in _files(filesystem, path, checked)
    ]


def _files(filesystem: Any, path: str, checked: set[str]) -> list[tuple[str, str]]:
    """The Parquet files at a path, sorted by name, each with its relative path.

    The first path is the one inside the filesystem.
    """
    files, found = files_at(filesystem, path, checked)
    if files and not found:
        return files
    if not found:
        exists = filesystem.get_file_info(path).type != load_pyarrow("pyarrow.fs").FileType.NotFound
        reason = "the folder holds no Parquet files" if exists else "there is no such file or folder"
        reason += "; give the folder instead of a pattern" if "*" in path else ""
        raise DataError(f"there is no Parquet at {path!r}: {reason}")
    if not files:
        raise DataError(f"there is no Parquet in {path!r}: no file there ends in .parquet")
    return files


def footer_of(filesystem: Any, path: str) -> Any:
    """The footer of a Parquet file, a ``pyarrow.parquet.FileMetaData``."""
    parquet = load_pyarrow("pyarrow.parquet")

    def read() -> Any:
        with filesystem.open_input_file(path) as stream:
            return parquet.read_metadata(stream)

    try:
        return retried(read, filesystem, f"reading the footer of {path}")
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is not a whole Parquet file: {error}") from error


def footers_of(filesystem: Any, paths: Iterable[str]) -> list[Any]:
    """The footers of several files, read side by side; see :func:`footer_of`."""
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        return list(pool.map(lambda path: footer_of(filesystem, path), paths))


def arrow_schema_of(footer: Any) -> Any:
    """The ``pyarrow.Schema`` in which a file is read."""
    leaves = map(footer.schema.column, range(footer.num_columns))
    if all(leaf.physical_type != "INT96" for leaf in leaves):
        return footer.schema.to_arrow_schema()
    nothing = load_pyarrow().BufferReader(b"")  # of the file itself
    file = load_pyarrow("pyarrow.parquet").ParquetFile(nothing, metadata=footer, coerce_int96_timestamp_unit=INT96_UNIT)
    return file.schema_arrow


def leaves_of(footer: Any, names: Iterable[str]) -> dict[str, list[int]]:
    """The indices of the Parquet columns (leaves) that make each named column."""
    leaves: dict[str, list[int]] = {name: [] for name in names}
    for index in range(footer.num_columns):
        leaf = footer.schema.column(index).path
        # A column's name may hold dots itself.
        while leaf and leaf not in leaves:
            leaf = leaf.rpartition(".")[0]
        if leaf:
            leaves[leaf].append(index)
    return leaves


def statistics_of(footer: Any, row_group: int, names: Sequence[str]) -> Callable[[str], Statistics]:
    """What a footer says about the named columns of a row group."""
    group, leaves = footer.row_group(row_group), leaves_of(footer, names)
    rows = group.num_rows

    def of(name: str) -> Statistics:
        found = group.column(leaves[name][0]).statistics if len(leaves[name]) == 1 else None
        if found is None or group.column(leaves[name][0]).path_in_schema != name:
            return Statistics(rows=rows)
        low, high = _bounds(found)
        nulls = found.null_count if found.has_null_count else None
        return Statistics(rows=rows, nulls=nulls, low=low, high=high)

    return of


def _bounds(statistics: Any) -> tuple[Any, Any]:
    """The least and the greatest value of a leaf in a row group.

    None and None if they are not known exactly.
    """
    if not statistics.has_min_max or _is_time_ns(statistics.logical_type):
        return None, None
    try:
        low, high = statistics.min, statistics.max
    except (OverflowError, ValueError):  # a year that Python's datetime does not have
        return None, None
    return (low, high) if low == low and high == high else (None, None)  # NaN bounds nothing


def _is_time_ns(logical_type: Any) -> bool:
    """Whether pyarrow would cut the bounds to microseconds."""
    return bool(logical_type.type == "TIME" and "nanoseconds" in logical_type.to_json())
