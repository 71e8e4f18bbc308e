"""Existing Parquet data: its files, row groups and columns, and what its footers say about them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from hvd_cluster.data.dataset import RowGroup
from hvd_cluster.data.filters import RowFilter
from hvd_cluster.data.optional import load_pyarrow
from hvd_cluster.data.reading import hive
from hvd_cluster.data.reading.common_schema import CommonSchema
from hvd_cluster.data.reading.footers import memory_bytes, row_group_bytes
from hvd_cluster.data.reading.parquet_files import NUM_THREADS, files_at, footers_of, leaves_of, statistics_of
from hvd_cluster.data.reading.row_groups import RowGroupTables
from hvd_cluster.data.reading.shards import RowRange
from hvd_cluster.data.schema import UNKNOWN, Column, Kind, Schema, infer, missing_columns_text
from hvd_cluster.data.writing.column_stats import TableStats
from hvd_cluster.errors import DataError

#: A file whose name begins so in a folder says that its data is still being written, or that the writer died.
INCOMPLETE = "_INCOMPLETE"
#: A file of this name says that the data is complete.
SUCCESS = "_SUCCESS"
#: Rows that are read to learn the lengths of lists.
_SAMPLE_ROWS = 64


class ParquetFolder:
    """The Parquet files of a data set, opened for their footers only.

    Args:
        filesystem: the ``pyarrow.fs.FileSystem`` that serves the files.
        files: path inside the filesystem, and path below the data set's folder, as :func:`files_of` returns them;
            folders named ``key=value`` in the latter are columns too.
        columns: the columns to read; None for all.
        decoded: columns that may hold anything, because a function makes tensors of them.
        raw: columns that are kept as they are stored, as that of :func:`hvd_cluster.data.schema.infer`.
        texts: columns that are text even where their folders name nothing but numbers ("month=01").
        wrong: takes what is wrong with columns, as that of :func:`hvd_cluster.data.schema.infer`.

    Raises:
        DataError: a footer is damaged, or columns are missing or of an impossible type.
    """

    def __init__(
        self,
        filesystem: Any,
        files: Sequence[tuple[str, str]],
        columns: Sequence[str] | None = None,
        decoded: Collection[str] = (),
        *,
        raw: Collection[str] = (),
        texts: Collection[str] = (),
        wrong: list[str] | None = None,
    ) -> None:
        self._filesystem = filesystem
        self.paths = [path for path, _ in files]
        #: Path -> ``pyarrow.parquet.FileMetaData``.
        self.footers = dict(zip(self.paths, footers_of(filesystem, self.paths), strict=True))
        partitions = hive.partitions([below for _, below in files], texts)
        folder_fields = hive.arrow_fields(partitions)
        schemas = []
        unstored = {field.name for field in folder_fields}
        for number, footer in enumerate(self.footers.values()):
            stored = footer.schema.to_arrow_schema()
            own = [field for field in folder_fields if field.name not in stored.names]
            schemas.append(load_pyarrow().schema([*stored, *own], metadata=stored.metadata))
            names = {field.name for field in own}
            unstored &= names
            partitions[number] = tuple(pair for pair in partitions[number] if pair[0] in names)
        #: Columns that only the names of folders hold, and their Arrow types.
        self.folder_types = {field.name: field.type for field in folder_fields if field.name in unstored}
        self._common = CommonSchema.of(schemas, self.paths)
        #: Columns that a file lacks are nulls in it, as those that a folder names null.
        self._partitions = {
            path: (*partition, *((name, None) for name in lacking))
            for path, partition, lacking in zip(self.paths, partitions, self._common.lacking, strict=True)
        }
        self.arrow_schema = self._common.schema
        #: Lengths of lists and vectors that the types leave open are UNKNOWN.
        self.schema = infer(self.arrow_schema, columns, decoded, wrong, raw)
        self._common.require(self.schema.names)
        self.row_groups = self.row_groups_of(self.schema.names)

    @property
    def footers_bytes(self) -> tuple[int, ...]:
        """Bytes that each file's footer takes in memory."""
        return tuple(map(memory_bytes, self.footers.values()))

    @property
    def texts(self) -> frozenset[str]:
        """The columns of text or bytes."""
        types = load_pyarrow("pyarrow.types")
        tests = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
        return frozenset(field.name for field in self.arrow_schema if any(test(field.type) for test in tests))

    @property
    def types(self) -> dict[str, Any]:
        """The Arrow type of each column that some file has in another type, or lacks."""
        return self._common.changed

    @property
    def rows(self) -> int:
        """Rows over all files."""
        return sum(group.rows for group in self.row_groups)

    def stats(self) -> TableStats:
        """Nulls and list lengths, from the footers where they are proof, else from the column itself.

        Only the first row group's vectors are read; the reader checks the others.
        """
        stats = TableStats()
        counted = Schema(tuple(column for column in self.schema if column.kind is not Kind.OTHER))
        for number, group in enumerate(self.row_groups):
            footer = self.footers[group.path].row_group(group.index)
            leaves, constants = leaves_of(self.footers[group.path], counted.names), dict(group.partition)
            doubtful = [
                column
                for column in counted
                if (number == 0 and column.shape)
                or constants.get(column.name, "") is None
                or (
                    column.name not in constants
                    and not _is_clean(footer, leaves[column.name], column, stats.shape(column.name))
                )
            ]
            if doubtful:
                selected = Schema(tuple(doubtful))
                stats.add(self.read(group, selected.names), selected)
        return stats

    def with_lengths(self, schema: Schema) -> Schema:
        """The schema with the lengths of the first rows' lists and vectors in place of UNKNOWN ones."""
        doubtful = Schema(tuple(column for column in schema if UNKNOWN in column.shape))
        if not doubtful.columns or not self.row_groups:
            return schema
        first = self.row_groups[0]
        sample = RowRange(first, 0, min(_SAMPLE_ROWS, first.rows))
        stats = TableStats()
        stats.add(self._tables(doubtful.names).read([sample]), doubtful)
        lengths = stats.with_lengths(doubtful)
        return Schema(tuple(lengths[column.name] if column.name in doubtful else column for column in schema))

    def read(self, group: RowGroup, columns: Sequence[str]) -> Any:
        """Columns of a row group as an Arrow table; text as dictionaries."""
        return self._tables(columns, self.texts).read([RowRange(group, 0, group.rows)])

    def _tables(self, columns: Sequence[str], texts: Collection[str] = ()) -> RowGroupTables:
        return RowGroupTables(self._filesystem, columns, texts=texts, types=self.types)

    def require(self, names: Sequence[str]) -> None:
        """Check that the named columns exist and have one type."""
        missing = [name for name in names if name not in self.arrow_schema.names]
        if missing:
            raise DataError(missing_columns_text(missing, self.arrow_schema.names))
        self._common.require(names)

    def verdict(self, group: RowGroup, row_filter: RowFilter) -> bool | None:
        """Whether a filter lets all rows of a row group through, or none; None if only its rows decide."""
        return row_filter.verdict(
            statistics_of(self.footers[group.path], group.index, group.partition, row_filter.names)
        )

    def filtered(self, row_filter: RowFilter) -> tuple[RowGroup, ...]:
        """The row groups that have rows which a filter lets through; their ``rows`` count these alone.

        Statistics decide where they can; else the filter's columns are read, and no others.
        """
        self.require(row_filter.names)

        def matching(group: RowGroup) -> int:
            verdict = self.verdict(group, row_filter)
            if verdict is None:
                table = self.read(group, row_filter.names)
                return int(load_pyarrow("pyarrow.compute").sum(row_filter.mask(table)).as_py() or 0)
            return group.rows if verdict else 0

        groups = self.row_groups_of(list(dict.fromkeys([*self.schema.names, *row_filter.names])))
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            counts = list(pool.map(matching, groups))
        return tuple(
            dataclasses.replace(
                group, rows=count, size_bytes=group.size_bytes * count // group.rows, whole_rows=group.rows
            )
            for group, count in zip(groups, counts, strict=True)
            if count
        )

    def row_groups_of(self, columns: Sequence[str]) -> tuple[RowGroup, ...]:
        """All row groups that have rows; their sizes are those of the named columns."""
        groups = []
        for path, footer in self.footers.items():
            leaves = [leaf for indices in leaves_of(footer, columns).values() for leaf in indices]
            for index in range(footer.num_row_groups):
                if rows := footer.row_group(index).num_rows:
                    size = row_group_bytes(footer, index, leaves)
                    groups.append(RowGroup(path, index, rows, size_bytes=size, partition=self._partitions[path]))
        return tuple(groups)


def files_of(filesystem: Any, paths: Sequence[str], *, listed: bool = False) -> list[tuple[str, str]]:
    """The Parquet files at paths: inside the filesystem, and relative to the data set's folder.

    Args:
        filesystem: the ``pyarrow.fs.FileSystem`` that serves the paths.
        paths: files or folders; in a folder, names that begin with "_" or "." are passed over.
        listed: the paths are some of the files and folders of a data set: ``key=value`` folders that they lie in, one
            directly below the other, count too.

    Raises:
        DataError: there is no Parquet, it is half-written, or it belongs to a table of another format.
    """
    checked: set[str] = set()
    return [
        (file, f"{hive.folders_above(file, below)}{below}" if listed else below)
        for path in paths
        for file, below in _files(filesystem, path, checked)
    ]


def _files(filesystem: Any, path: str, checked: set[str]) -> list[tuple[str, str]]:
    """The Parquet files at a path, sorted by name: inside the filesystem, and relative to the path."""
    files, found = files_at(filesystem, path, checked)
    if files and not found:
        return files
    if not found:
        exists = filesystem.get_file_info(path).type != load_pyarrow("pyarrow.fs").FileType.NotFound
        reason = "the folder holds no Parquet files" if exists else "there is no such file or folder"
        raise DataError(f"there is no Parquet at {path!r}: {reason}")
    below = [info.path[len(path) :].strip("/") for info in found]
    if any(name.split("/")[0].split(".")[0] in {"_temporary", INCOMPLETE} for name in below):
        raise DataError(f"the data in {path!r} is still being written, or its writer died: write it again")
    if not files:
        raise DataError(f"there is no Parquet in {path!r}: no file there ends in .parquet")
    return files


def _is_clean(row_group: Any, indices: Sequence[int], column: Column, shape: tuple[int, ...]) -> bool:
    """Whether the footer proves that a column has no nulls and, on average, lists of this shape."""
    leaves = [row_group.column(index) for index in indices]
    if column.kind is Kind.VECTOR and len(leaves) > 1:
        # The type is set in every row that is not null; the other fields need not be (a dense vector has no indices).
        leaves = [leaf for leaf in leaves if leaf.path_in_schema == f"{column.name}.type"]
        shape = ()
    for leaf in leaves:
        statistics = leaf.statistics
        if statistics is None or not statistics.has_null_count or statistics.null_count:
            return False
        if leaf.num_values != row_group.num_rows * math.prod(shape):
            return False
    return bool(leaves)


def held_out(row_groups: Sequence[RowGroup], ratio: float, seed: int) -> tuple[list[RowGroup], list[RowGroup]]:
    """Split row groups into (train, validation) without rewriting them.

    Each row group gives one contiguous piece, at a place drawn by (seed, its number), so that every part of the data is
    represented. The share is exact to one row over all row groups. One that gives no row stays whole.
    """
    train: list[RowGroup] = []
    validation: list[RowGroup] = []
    seen = taken = 0
    for number, group in enumerate(row_groups):
        seen += group.rows
        count = min(group.rows, math.floor(seen * ratio + 0.5) - taken)
        taken += count
        start = 0
        if count:
            start = int(np.random.RandomState([seed & 0xFFFFFFFF, number]).randint(0, group.rows - count + 1))
        for begin, stop, part in (
            (0, start, train),
            (start, start + count, validation),
            (start + count, group.rows, train),
        ):
            if stop > begin:
                size = group.size_bytes * (stop - begin) // group.rows
                piece = dataclasses.replace(group, rows=stop - begin, start=group.start + begin, size_bytes=size)
                part.append(dataclasses.replace(piece, whole_rows=max(group.rows, group.whole_rows)))
    return train, validation
