"""The columns of a table that are wanted, and what is known of them.

That is their schema, and the row groups that hold rows.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from hvd_cluster.data.columns.arrow_values import is_text, is_variable_bytes
from hvd_cluster.data.filters import RowFilter
from hvd_cluster.data.optional import load_pyarrow
from hvd_cluster.data.reading.parquet_files import NUM_THREADS
from hvd_cluster.data.reading.row_groups import RowGroupTables
from hvd_cluster.data.reading.shards import RowRange
from hvd_cluster.data.row_group import RowGroup
from hvd_cluster.data.schema import UNKNOWN, Column, ColumnKind, Schema, infer
from hvd_cluster.data.tables.table_source import TableSource
from hvd_cluster.data.writing.column_stats import TableStats

#: Rows that are read to learn the lengths of lists.
_SAMPLE_ROWS = 64


class TableColumns:
    """Columns of a table.

    Args:
        table: the table.
        columns: the columns to read; None for all.
        decoded: columns that may hold anything, because a function makes tensors of them.
        raw: columns that are kept as they are stored, as that of :func:`hvd_cluster.data.schema.infer`.
        wrong: takes what is wrong with columns, as that of :func:`hvd_cluster.data.schema.infer`.

    Raises:
        DataError: columns are missing or of an impossible type.
    """

    def __init__(
        self,
        table: TableSource,
        columns: Sequence[str] | None = None,
        decoded: Collection[str] = (),
        *,
        raw: Collection[str] = (),
        wrong: list[str] | None = None,
    ) -> None:
        self.table = table
        #: Lengths of lists and vectors that the types leave open are UNKNOWN.
        self.schema = infer(table.arrow_schema, columns, decoded, wrong, raw)
        table.require(self.schema.names)

    @functools.cached_property
    def row_groups(self) -> tuple[RowGroup, ...]:
        """All row groups that have live rows."""
        return self.table.fragments(self.schema.names)

    @property
    def texts(self) -> frozenset[str]:
        """The columns of text or bytes."""
        return frozenset(
            field.name for field in self.table.arrow_schema if is_text(field.type) or is_variable_bytes(field.type)
        )

    @property
    def rows(self) -> int:
        """All live rows."""
        return sum(group.rows for group in self.row_groups)

    def stats(self) -> TableStats:
        """Nulls and list lengths, from footers that prove them, else from the column.

        Only the first row group's vectors are read; the reader checks the others.
        """
        stats = TableStats()
        counted = Schema(tuple(column for column in self.schema if column.kind is not ColumnKind.OTHER))
        for number, group in enumerate(self.row_groups):
            doubtful = [column for column in counted if self._is_doubtful(column, group, number, stats)]
            if doubtful:
                selected = Schema(tuple(doubtful))
                stats.add(self.read(group, selected.names), selected)
        return stats

    def _is_doubtful(self, column: Column, group: RowGroup, number: int, stats: TableStats) -> bool:
        """Whether a row group's nulls and list lengths are unknown until it is read."""
        if number == 0 and column.shape:
            return True
        return not self.table.is_clean(group, column, stats.shape(column.name))

    def with_lengths(self, schema: Schema, groups: Sequence[RowGroup], row_filter: RowFilter | None = None) -> Schema:
        """The schema with lengths of the first rows' lists for UNKNOWN ones.

        Vectors count as lists.

        Args:
            schema: of these columns.
            groups: the row groups that are read, as :meth:`filtered` returns them where there is a filter.
            row_filter: which of their rows are read; lists of other rows may have other lengths.
        """
        doubtful = Schema(tuple(column for column in schema if UNKNOWN in column.shape))
        if not doubtful.columns or not groups:
            return schema
        first = groups[0]
        sample = RowRange(first, 0, min(_SAMPLE_ROWS, first.rows))
        stats = TableStats()
        stats.add(self._tables(doubtful.names, row_filter=row_filter).read([sample]), doubtful)
        lengths = stats.with_lengths(doubtful)
        return Schema(tuple(lengths[column.name] if column.name in doubtful else column for column in schema))

    def read(self, group: RowGroup, columns: Sequence[str]) -> Any:
        """Columns of a row group as an Arrow table; text as dictionaries."""
        return self._tables(columns, self.texts).read([RowRange(group, 0, group.rows)])

    def _tables(
        self, columns: Sequence[str], texts: Collection[str] = (), row_filter: RowFilter | None = None
    ) -> RowGroupTables:
        return RowGroupTables(self.table.reader, columns, row_filter, texts=texts, snapshot=self.table.snapshot)

    def filtered(self, row_filter: RowFilter) -> tuple[RowGroup, ...]:
        """The row groups with rows that a filter lets through.

        Their ``rows`` count these alone. Statistics decide where they can; else the filter's columns are read, and no
        others.
        """
        self.table.require(row_filter.names)

        def matching(group: RowGroup) -> int:
            verdict = row_filter.verdict(self.table.statistics(group, row_filter.names))
            if verdict is None:
                table = self.read(group, row_filter.names)
                return int(load_pyarrow("pyarrow.compute").sum(row_filter.mask(table)).as_py() or 0)
            return group.rows if verdict else 0

        groups = self.table.fragments(list(dict.fromkeys([*self.schema.names, *row_filter.names])), row_filter)
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            counts = list(pool.map(matching, groups))
        return tuple(
            dataclasses.replace(
                group,
                rows=count,
                size_bytes=group.size_bytes * count // group.rows,
                whole_rows=max(group.rows, group.whole_rows),
            )
            for group, count in zip(groups, counts, strict=True)
            if count
        )


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
