"""Parquet that is already there: its files, row groups and columns, and what its footers tell of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from hvd_cluster.data.census import Census
from hvd_cluster.data.dataset import RowGroup
from hvd_cluster.data.optional import load_pyarrow
from hvd_cluster.data.schema import Column, Kind, Schema, infer
from hvd_cluster.data.store import Store
from hvd_cluster.errors import DataError

#: A file of this name in a folder says that its data is still being written, or that the writer died.
INCOMPLETE = "_INCOMPLETE"
#: A file of this name says that the data is complete.
SUCCESS = "_SUCCESS"
#: Footers are read by this many threads: they are small, and far away on object stores.
_FOOTER_THREADS = 8


class ParquetFolder:
    """The Parquet files at a path, opened for their footers only.

    Args:
        store: serves the path.
        path: a file, or a folder; in a folder, names that begin with "_" or "." are passed over.
        columns: the columns that are asked for; None for all.

    Raises:
        DataError: there is no Parquet, it is half-written or damaged, or columns are missing or of an impossible type.
    """

    def __init__(self, store: Store, path: str, columns: Sequence[str] | None = None) -> None:
        self.store = store
        self.paths = _files(store, path)
        with ThreadPoolExecutor(_FOOTER_THREADS) as pool:
            footers = list(pool.map(self._footer, self.paths))
        self._footers = dict(zip(self.paths, footers, strict=True))
        self.arrow_schema = footers[0].schema.to_arrow_schema()
        #: List and vector lengths are those of the first row group.
        self.schema = infer(self.arrow_schema, columns)
        #: For each file, the leaves (Parquet column chunks of a row group) that belong to each column.
        self._leaves = {path: _leaves(footer, self.schema.names) for path, footer in self._footers.items()}
        for file, footer in self._footers.items():
            other = infer(footer.schema.to_arrow_schema(), self.schema.names)
            if [(c.name, c.kind, c.dtype) for c in other] != [(c.name, c.kind, c.dtype) for c in self.schema]:
                raise DataError(f"the columns of {file} have other types than those of {self.paths[0]}")
        self.row_groups = tuple(self._row_groups())

    @property
    def rows(self) -> int:
        """Rows over all files."""
        return sum(group.rows for group in self.row_groups)

    def census(self) -> Census:
        """Nulls and list lengths, from the footers where they are proof, else from the column itself.

        Vectors are looked at in the first row group only; the reader checks the others.
        """
        census = Census()
        for number, group in enumerate(self.row_groups):
            footer, leaves = self._footers[group.path].row_group(group.index), self._leaves[group.path]
            doubtful = [
                column
                for column in self.schema
                if (number == 0 and column.shape)
                or not _is_clean(footer, leaves[column.name], column, census.shape(column.name))
            ]
            if doubtful:
                selected = Schema(tuple(doubtful))
                census.add(self.read(group, selected.names), selected)
        return census

    def read(self, group: RowGroup, columns: Sequence[str]) -> Any:
        """Columns of a row group as an Arrow table."""
        parquet = load_pyarrow("pyarrow.parquet")
        try:
            with parquet.ParquetFile(group.path, filesystem=self.store.fs) as file:
                return file.read_row_group(group.index, columns=list(columns))
        except (OSError, ValueError) as error:
            raise DataError(f"cannot read row group {group.index} of {group.path}: {error}") from error

    def _footer(self, path: str) -> Any:
        parquet = load_pyarrow("pyarrow.parquet")
        try:
            return parquet.read_metadata(path, filesystem=self.store.fs)
        except (OSError, ValueError) as error:
            raise DataError(f"{path} is not a whole Parquet file: {error}") from error

    def _row_groups(self) -> Iterator[RowGroup]:
        for path, footer in self._footers.items():
            leaves = [leaf for indices in self._leaves[path].values() for leaf in indices]
            for index in range(footer.num_row_groups):
                group = footer.row_group(index)
                if group.num_rows:
                    size = sum(group.column(leaf).total_uncompressed_size for leaf in leaves)
                    yield RowGroup(path, index, group.num_rows, size_bytes=size)


def _files(store: Store, path: str) -> list[str]:
    """The Parquet files at a path, sorted by name."""
    inner = store.get_localized_path(path)
    if store.is_file(path):
        return [inner]
    listed = store.list(path, recursive=True)
    if not listed:
        raise DataError(f"there is no Parquet at {path!r}: no such file, or an empty folder")
    below = [file[len(inner) :].strip("/") for file in listed]
    if any(name.split("/")[0] in {"_temporary", INCOMPLETE} for name in below):
        raise DataError(f"the data in {path!r} is still being written, or its writer died: write it again")
    if any("=" in part for name in below for part in name.split("/")[:-1]):
        raise DataError(f"{path!r} is partitioned into key=value folders: name one of them, or read it as a DataFrame")
    files = [
        file
        for file, name in zip(listed, below, strict=True)
        if name.endswith((".parquet", ".parq", ".pq")) and not any(part[0] in "_." for part in name.split("/"))
    ]
    if not files:
        raise DataError(f"there is no Parquet in {path!r}: no file there ends in .parquet")
    return files


def _leaves(footer: Any, names: Sequence[str]) -> dict[str, list[int]]:
    """For each named column the indices of the Parquet columns that it is made of."""
    leaves: dict[str, list[int]] = {name: [] for name in names}
    for index in range(footer.num_columns):
        path = footer.schema.column(index).path
        # A column's name may hold dots itself.
        while path and path not in leaves:
            path = path.rpartition(".")[0]
        if path:
            leaves[path].append(index)
    return leaves


def _is_clean(row_group: Any, indices: Sequence[int], column: Column, shape: tuple[int, ...]) -> bool:
    """Whether the footer proves that a column has no nulls and, on average, lists of this shape."""
    leaves = [row_group.column(index) for index in indices]
    if column.kind is Kind.VECTOR and len(leaves) > 1:
        # In a row that is not null the type is set; the other fields are null by turns.
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
    represented. The share is exact to one row over all row groups.
    """
    train: list[RowGroup] = []
    validation: list[RowGroup] = []
    seen = taken = 0
    for number, group in enumerate(row_groups):
        seen += group.rows
        count = min(group.rows, math.floor(seen * ratio + 0.5) - taken)
        taken += count
        start = int(np.random.RandomState([seed & 0xFFFFFFFF, number]).randint(0, group.rows - count + 1))
        for begin, stop, part in (
            (0, start, train),
            (start, start + count, validation),
            (start + count, group.rows, train),
        ):
            if stop > begin:
                size = group.size_bytes * (stop - begin) // group.rows
                part.append(RowGroup(group.path, group.index, stop - begin, group.start + begin, size))
    return train, validation
