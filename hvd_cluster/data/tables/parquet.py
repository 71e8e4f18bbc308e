"""Parquet files as a table: row groups, what footers say, and how they are read."""

from __future__ import annotations

import dataclasses
import functools
import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hvd_cluster.data.cache import source_of
from hvd_cluster.data.files.filesystems import as_filesystem
from hvd_cluster.data.files.retry import retried
from hvd_cluster.data.filters import RowFilter, Statistics
from hvd_cluster.data.optional import load_pyarrow, since_pyarrow
from hvd_cluster.data.reading import hive
from hvd_cluster.data.reading.common_schema import CommonSchema, keeps_values
from hvd_cluster.data.reading.footers import FooterCache, memory_bytes, row_group_bytes
from hvd_cluster.data.reading.hive import Partition
from hvd_cluster.data.reading.parquet_files import INT96_UNIT, arrow_schema_of, footers_of, leaves_of, statistics_of
from hvd_cluster.data.row_group import RowGroup, live_rows, pack_deleted
from hvd_cluster.data.schema import Column, ColumnKind
from hvd_cluster.data.tables.table_source import FragmentReader, TableSource
from hvd_cluster.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

#: Files of this name are Arrow's own format, mapped into memory; all others are Parquet.
ARROW_SUFFIX = ".arrow"


class ParquetFragments(FragmentReader):
    """A reader of row groups: of Parquet anywhere, of Arrow files on the local disk.

    It remembers the last files' footers.

    Args:
        place: the Store or ``pyarrow.fs.FileSystem`` that serves the paths.
        types: column -> the Arrow type that tables of every file get; others stay as they are stored.
    """

    def __init__(self, place: Any, types: Mapping[str, Any] | None = None) -> None:
        self._place = place
        self.types = dict(types or {})
        self._footers = FooterCache()

    @property
    def filesystem(self) -> Any:
        """The ``pyarrow.fs.FileSystem`` with the files."""
        return as_filesystem(self._place)

    def file(self, path: str) -> tuple[Any, str]:
        return self.filesystem, path

    def read(
        self, fragments: Sequence[RowGroup], names: Sequence[str], texts: Collection[str]
    ) -> tuple[pa.Table, list[int]]:
        path, stored = fragments[0].path, dict(fragments[0].stored_names)
        wanted = {stored.get(name, name): name for name in names}
        indices = [fragment.index for fragment in fragments]

        def read() -> tuple[pa.Table, list[int]]:
            if path.endswith(ARROW_SUFFIX):
                return self._arrow(path, indices, list(wanted))
            return self._parquet(path, indices, list(wanted), texts=[key for key in wanted if wanted[key] in texts])

        table, rows = retried(read, self.filesystem, f"reading {fragments[0].place}", warns=False)
        if stored:
            table = table.rename_columns([wanted.get(name, name) for name in table.column_names])
        if not any(fragment.deleted for fragment in fragments):
            return table, rows
        masks = [live_rows(fragment.deleted, count) for fragment, count in zip(fragments, rows, strict=True)]
        return table.filter(load_pyarrow().array(np.concatenate(masks))), [int(mask.sum()) for mask in masks]

    def source(self, path: str) -> str:
        return source_of(self.filesystem, path)

    def shares_memory(self, path: str) -> bool:
        return path.endswith(ARROW_SUFFIX)

    def _parquet(
        self, path: str, indices: Sequence[int], names: Sequence[str], texts: Sequence[str]
    ) -> tuple[pa.Table, list[int]]:
        parquet = load_pyarrow("pyarrow.parquet")
        # No threads of Arrow's own: ours run side by side already, and their number is what the user chose.
        with self.filesystem.open_input_file(path) as stream:
            footer = self._footers.get(path, lambda: parquet.read_metadata(stream))
            file = parquet.ParquetFile(
                stream,
                metadata=footer,
                read_dictionary=list(texts),
                pre_buffer=True,
                coerce_int96_timestamp_unit=INT96_UNIT,
                **since_pyarrow(15, page_checksum_verification=True),
            )
            table = file.read_row_groups(indices, columns=list(names), use_threads=False)
            return table, [footer.row_group(index).num_rows for index in indices]

    def _arrow(self, path: str, indices: Sequence[int], names: Sequence[str]) -> tuple[pa.Table, list[int]]:
        pyarrow, ipc = load_pyarrow(), load_pyarrow("pyarrow.ipc")
        with ipc.open_file(pyarrow.memory_map(path)) as file:
            batches = [file.get_batch(index) for index in indices]
        return pyarrow.Table.from_batches(batches).select(list(names)), [batch.num_rows for batch in batches]


@dataclass(frozen=True, kw_only=True)
class DataFile:
    """A Parquet file of a table."""

    #: Path inside the filesystem.
    path: str
    #: Columns that have one value in the whole file, and that it does not hold itself.
    constants: Partition = ()
    #: Column -> its name in the file, where that differs.
    stored_names: tuple[tuple[str, str], ...] = ()
    #: Numbers of the rows that are deleted, ascending, each once; None for none.
    deleted: npt.NDArray[np.int64] | None = None


class ParquetTable(TableSource):
    """A table whose rows are in Parquet files."""

    #: Path -> ``pyarrow.parquet.FileMetaData`` of the files that were opened.
    footers: dict[str, Any]

    @abstractmethod
    def files(self, names: Sequence[str], row_filter: RowFilter | None) -> Sequence[DataFile]:
        """The files, whose footers are in ``footers`` afterwards.

        Args:
            names: the columns that will be read.
            row_filter: files without such rows may be left out.
        """

    @property
    def footers_bytes(self) -> tuple[int, ...]:
        return tuple(map(memory_bytes, self.footers.values()))

    def fragments(self, names: Sequence[str], row_filter: RowFilter | None = None) -> tuple[RowGroup, ...]:
        return tuple(group for file in self.files(names, row_filter) for group in self._row_groups(file, names))

    def _row_groups(self, file: DataFile, names: Sequence[str]) -> list[RowGroup]:
        footer, stored = self.footers[file.path], dict(file.stored_names)
        leaves = [leaf for found in leaves_of(footer, [stored.get(n, n) for n in names]).values() for leaf in found]
        groups, begin = [], 0
        for index in range(footer.num_row_groups):
            rows = live = footer.row_group(index).num_rows
            deleted = b""
            if file.deleted is not None:
                first, last = np.searchsorted(file.deleted, [begin, begin + rows])
                deleted = pack_deleted(file.deleted[first:last] - begin, rows)
                live -= int(last - first)
            begin += rows
            if live:
                size = row_group_bytes(footer, index, leaves)
                groups.append(
                    RowGroup(
                        file.path,
                        index,
                        live,
                        size_bytes=size * live // rows,
                        partition=file.constants,
                        whole_rows=rows if live < rows else 0,
                        stored_names=file.stored_names,
                        deleted=deleted,
                    )
                )
        return groups

    def statistics(self, fragment: RowGroup, names: Sequence[str]) -> Callable[[str], Statistics]:
        constants, stored = dict(fragment.partition), dict(fragment.stored_names)
        of_constant = super().statistics(fragment, names)
        kept = {name: stored.get(name, name) for name in names if name not in constants}
        types, own = self.reader.types, self._own_schema(fragment.path)
        whole = [name for name in kept if name not in types or keeps_values(own.field(kept[name]).type, types[name])]
        of_stored = statistics_of(self.footers[fragment.path], fragment.index, list(kept.values()))

        def of(name: str) -> Statistics:
            if name in constants:
                return of_constant(name)
            found = of_stored(kept[name])
            return found if name in whole else dataclasses.replace(found, low=None, high=None)

        return of

    def _own_schema(self, path: str) -> Any:
        """The ``pyarrow.Schema`` of a file."""
        if path not in self._own_schemas:
            self._own_schemas[path] = arrow_schema_of(self.footers[path])
        return self._own_schemas[path]

    @functools.cached_property
    def _own_schemas(self) -> dict[str, Any]:
        return {}

    def is_clean(self, fragment: RowGroup, column: Column, shape: tuple[int, ...]) -> bool:
        constants = dict(fragment.partition)
        if column.name in constants:
            return constants[column.name] is not None
        footer = self.footers[fragment.path]
        name = dict(fragment.stored_names).get(column.name, column.name)
        row_group = footer.row_group(fragment.index)
        leaves = [row_group.column(index) for index in leaves_of(footer, [name])[name]]
        if column.kind is ColumnKind.VECTOR and len(leaves) > 1:
            # The type is set in every row that is not null; the other fields need not be (dense vectors lack indices)
            leaves = [leaf for leaf in leaves if leaf.path_in_schema == f"{name}.type"]
            shape = ()
        for leaf in leaves:
            statistics = leaf.statistics
            if statistics is None or not statistics.has_null_count or statistics.null_count:
                return False
            if leaf.num_values != row_group.num_rows * math.prod(shape):
                return False
        return bool(leaves)


class ParquetFolder(ParquetTable):
    """The Parquet files of a data set, opened for their footers only.

    Args:
        place: the Store or ``pyarrow.fs.FileSystem`` that serves the files.
        files: path inside the filesystem, and path below the data set's folder, as
            :func:`hvd_cluster.data.reading.parquet_files.files_of` returns them; folders named ``key=value`` in the
            latter are columns too.
        texts: columns that are text even where their folders name nothing but numbers ("month=01").
        name: names the data set in messages.

    Raises:
        DataError: a footer is damaged, or a file is listed twice.
    """

    def __init__(
        self, place: Any, files: Sequence[tuple[str, str]], *, texts: Collection[str] = (), name: str = ""
    ) -> None:
        self.paths = [path for path, _ in files]
        self.name = name or repr(self.paths[0])
        if len(set(self.paths)) < len(self.paths):
            twice = next(path for path, times in Counter(self.paths).items() if times > 1)
            raise DataError(f"{twice!r} is listed twice: list each file once, and no folder beside a file in it")
        self.footers = dict(zip(self.paths, footers_of(as_filesystem(place), self.paths), strict=True))
        partitions = hive.partitions([below for _, below in files], texts)
        folder_fields = hive.arrow_fields(partitions)
        schemas = []
        unstored = {field.name for field in folder_fields}
        for number, footer in enumerate(self.footers.values()):
            stored = arrow_schema_of(footer)
            own = [field for field in folder_fields if field.name not in stored.names]
            schemas.append(load_pyarrow().schema([*stored, *own], metadata=stored.metadata))
            names = {field.name for field in own}
            unstored &= names
            partitions[number] = tuple(pair for pair in partitions[number] if pair[0] in names)
        #: Columns that only the names of folders hold, and their Arrow types.
        self.folder_types = {field.name: field.type for field in folder_fields if field.name in unstored}
        self._common = CommonSchema.of(schemas, self.paths)
        self.arrow_schema = self._common.schema
        self.reader = ParquetFragments(place, {**self._common.changed, **self.folder_types})
        # Columns that a file lacks are nulls in it, as those that a folder names null.
        self._files = [
            DataFile(path=path, constants=(*partition, *((name, None) for name in lacking)))
            for path, partition, lacking in zip(self.paths, partitions, self._common.lacking, strict=True)
        ]

    def files(self, names: Sequence[str], row_filter: RowFilter | None) -> Sequence[DataFile]:
        return self._files

    def require(self, names: Sequence[str]) -> None:
        """Check that the named columns exist and have one type."""
        super().require(names)
        self._common.require(names)
