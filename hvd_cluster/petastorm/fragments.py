"""What a reader deals out: row groups, or slices of them, found from the files' footers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from hvd_cluster.data.cache import source_of
from hvd_cluster.data.files.retry import retried
from hvd_cluster.data.filters import RowFilter
from hvd_cluster.data.optional import load_pyarrow
from hvd_cluster.data.reading import hive
from hvd_cluster.data.reading.common_schema import CommonSchema, as_type
from hvd_cluster.data.reading.hive import Partition
from hvd_cluster.data.reading.parquet_files import NUM_THREADS, files_at, footer_of, leaves_of, statistics_of
from hvd_cluster.errors import DataError
from hvd_cluster.petastorm.location import Location


@dataclass(frozen=True)
class Fragment:
    """Rows of one row group: all, or every slice-th of ``num_slices`` contiguous parts."""

    #: Path of the file inside the filesystem.
    path: str
    #: Index of the row group in the file.
    row_group: int
    #: Number of the row group over all files in the order of their names.
    number: int
    #: Rows of the whole row group.
    rows: int
    #: Bytes of the columns that are read, before compression.
    size_bytes: int
    #: Columns that the file's folders name, and their values.
    partition: Partition = ()
    #: Which of how many parts of the row group.
    slice: int = 0
    num_slices: int = 1

    @property
    def bounds(self) -> tuple[int, int]:
        """First row, and one past the last."""
        return self.rows * self.slice // self.num_slices, self.rows * (self.slice + 1) // self.num_slices

    @property
    def place(self) -> str:
        """For messages."""
        return f"row group {self.row_group} of {self.path}"


class FragmentTable:
    """The files of a data set, opened for their footers.

    Args:
        location: where they are.
        texts: columns whose values are text, even where folders name nothing but numbers ("month=01").

    Raises:
        DataError: there is no Parquet, or a footer is damaged.
    """

    def __init__(self, location: Location, texts: Collection[str] = ()) -> None:
        self._location = location
        self._sources: dict[str, str] = {}
        files = parquet_files(location)
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            footers = list(pool.map(lambda file: footer_of(location.filesystem, file[0]), files))
        self._footers = {path: footer for (path, _), footer in zip(files, footers, strict=True)}
        partitions = [
            tuple((name, _text(below, name) if name in texts else value) for name, value in partition)
            for (_, below), partition in zip(files, hive.partitions([below for _, below in files]), strict=True)
        ]
        common = CommonSchema.of([footer.schema.to_arrow_schema() for footer in footers], [path for path, _ in files])
        stored = common.schema
        self._common = common
        self._lacking = dict(zip(self._footers, map(frozenset, common.lacking), strict=True))
        folder_fields = [field for field in hive.arrow_fields(partitions) if field.name not in stored.names]
        #: Columns that only folders' names hold.
        self.folder_names = tuple(field.name for field in folder_fields)
        self._partitions = {
            path: (
                *(pair for pair in partition if pair[0] in self.folder_names),
                *((name, None) for name in lacking),
            )
            for (path, _), partition, lacking in zip(files, partitions, common.lacking, strict=True)
        }
        pyarrow = load_pyarrow()
        #: Of all columns; those that folders name come first.
        self.arrow_schema = pyarrow.schema([*folder_fields, *stored], metadata=stored.metadata)
        self._folder_types = {field.name: field.type for field in folder_fields}

    def source(self, fragment: Fragment) -> str:
        """The fragment's file as it was when it was first asked for."""
        if fragment.path not in self._sources:
            try:
                self._sources[fragment.path] = source_of(self._location.filesystem, fragment.path)
            except OSError as error:
                raise DataError(f"cannot read {fragment.place}: its file cannot be looked at: {error}") from error
        return self._sources[fragment.path]

    def fragments(self, columns: Sequence[str], num_slices: int = 1) -> list[Fragment]:
        """All row groups that have rows, in the order of the files' names.

        Args:
            columns: what will be read, which is what sizes count.
            num_slices: parts to cut each into.
        """
        found: list[Fragment] = []
        number = 0
        for path, footer in self._footers.items():
            leaves = [leaf for indices in leaves_of(footer, columns).values() for leaf in indices]
            for index in range(footer.num_row_groups):
                group = footer.row_group(index)
                if group.num_rows:
                    size = sum(group.column(leaf).total_uncompressed_size for leaf in leaves)
                    count = min(num_slices, group.num_rows)
                    partition = self._partitions[path]
                    found.extend(
                        Fragment(path, index, number, group.num_rows, size // count, partition, slice, count)
                        for slice in range(count)
                    )
                number += 1
        return found

    def pruned(self, fragments: Sequence[Fragment], row_filter: RowFilter | None) -> list[Fragment]:
        """The fragments that may hold rows which a filter lets through, as far as folders and footers show.

        Raises:
            DataError: there is no such column.
        """
        if row_filter is None:
            return list(fragments)
        self._require(row_filter.names)
        return [
            fragment
            for fragment in fragments
            if row_filter.verdict(
                statistics_of(self._footers[fragment.path], fragment.row_group, fragment.partition, row_filter.names)
            )
            is not False
        ]

    def _require(self, names: Sequence[str]) -> None:
        missing = [name for name in names if name not in self.arrow_schema.names]
        if missing:
            raise DataError(f"{self._location.text} has no columns {missing}; it has {self.arrow_schema.names}")
        self._common.require(names)

    def read(self, fragment: Fragment, columns: Sequence[str], row_filter: RowFilter | None = None) -> Any:
        """Columns of a fragment as a ``pyarrow.Table`` in the order given. Several threads may call this at once.

        Args:
            columns: their names; those of folders too.
            row_filter: which rows to keep.

        Raises:
            DataError: the file is damaged or gone, or lacks a column.
        """
        wanted = list(dict.fromkeys([*columns, *(row_filter.names if row_filter else ())]))
        self._require(wanted)
        table = self._stored(fragment, [name for name in wanted if name not in self._folder_types])
        start, stop = fragment.bounds
        if fragment.num_slices > 1:
            table = table.slice(start, stop - start)
        table = _with_folders(table, fragment.partition, self._folder_types, wanted, stop - start)
        if row_filter is not None:
            table = table.filter(row_filter.mask(table))
        return table.select(list(columns))

    def _stored(self, fragment: Fragment, names: Sequence[str]) -> Any:
        parquet = load_pyarrow("pyarrow.parquet")
        filesystem = self._location.filesystem
        present = [name for name in names if name not in self._lacking[fragment.path]]

        def read() -> Any:
            # No threads of Arrow's own: ours run side by side already, and their number is what the user chose.
            with parquet.ParquetFile(
                fragment.path, filesystem=filesystem, metadata=self._footers[fragment.path], pre_buffer=True
            ) as file:
                return file.read_row_group(fragment.row_group, columns=present, use_threads=False)

        try:
            table = retried(read, filesystem, f"reading {fragment.place}")
        except (OSError, ValueError, IndexError, NotImplementedError) as error:
            raise DataError(
                f"cannot read {fragment.place}: {error}; the file may be damaged, half-written or removed: write the "
                "data again"
            ) from error
        gone = [name for name in present if name not in table.column_names]
        if gone:
            raise DataError(f"{fragment.path} lacks the columns {gone}, which its footer had: write the data again")
        pyarrow = load_pyarrow()
        types = self._common.changed
        for name in names:
            if name in self._lacking[fragment.path]:
                table = table.append_column(name, pyarrow.chunked_array([pyarrow.nulls(fragment.rows, types[name])]))
            elif name in types:
                typed = as_type(table.column(name), types[name], name, fragment.path)
                table = table.set_column(table.column_names.index(name), name, typed)
        return table


def parquet_files(location: Location) -> list[tuple[str, str]]:
    """The Parquet files, sorted: path inside the filesystem, and path below the folder (its name, for a list of files).

    Raises:
        DataError: there are none, or the folder cannot be looked at.
    """
    found = parquet_files_if_any(location)
    if not found:
        raise DataError(f"there is no Parquet at {location.text!r}: no file there ends in .parquet")
    return found


def parquet_files_if_any(location: Location) -> list[tuple[str, str]]:
    """As :func:`parquet_files`; [] where there are none.

    Raises:
        DataError: the folder cannot be looked at.
    """
    found: list[tuple[str, str]] = []
    checked: set[str] = set()
    for path in location.paths:
        try:
            files, _ = files_at(location.filesystem, path, checked)
        except OSError as error:
            raise DataError(f"cannot look at {location.text}: {error}") from error
        for file, below in files:
            name = _below(path) if len(location.paths) > 1 else path.rsplit("/", 1)[-1]
            found.append((file, below or name))
    return sorted(found)


def _text(below: str, name: str) -> str | None:
    """The text that a folder names for a column; None for null."""
    part = next(part for part in below.split("/")[:-1] if unquote(part.split("=", 1)[0]) == name)
    text = part.split("=", 1)[1]
    return None if text == "__HIVE_DEFAULT_PARTITION__" else unquote(text)


def _below(path: str) -> str:
    """A listed file's path from its first ``key=value`` folder on: that much of it is data."""
    parts = path.split("/")
    first = next((index for index, part in enumerate(parts[:-1]) if "=" in part), len(parts) - 1)
    return "/".join(parts[first:])


def _with_folders(table: Any, partition: Partition, types: Mapping[str, Any], wanted: Sequence[str], rows: int) -> Any:
    pyarrow = load_pyarrow()
    values = dict(partition)
    columns = [
        pyarrow.repeat(pyarrow.scalar(values[name], types[name]), rows) if name in types else table.column(name)
        for name in wanted
    ]
    return pyarrow.table(columns, names=list(wanted))
