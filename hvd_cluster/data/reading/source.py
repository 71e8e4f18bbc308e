"""What a reader is given -> row groups, their schema and filesystem.

It is given paths, URLs, a data set or a split.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvd_cluster.data import filters as row_filters
from hvd_cluster.data.columns.column_config import ColumnConfig
from hvd_cluster.data.dataset import Dataset, Split
from hvd_cluster.data.reading import footers
from hvd_cluster.data.reading.table_columns import TableColumns
from hvd_cluster.data.row_group import RowGroup
from hvd_cluster.data.schema import ColumnKind, Schema
from hvd_cluster.data.store import Store
from hvd_cluster.data.tables.opening import open_table, require_one_version
from hvd_cluster.data.tables.parquet import ParquetFragments
from hvd_cluster.data.tables.table_source import FragmentReader
from hvd_cluster.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Source:
    """Row groups that can be read."""

    #: Reads them.
    reader: FragmentReader
    #: The columns to read, in the shapes that rules declare.
    schema: Schema
    #: The row groups, the rows that are wanted of them, and the lanes that they are read in.
    split: Split
    #: Columns of text or bytes.
    texts: frozenset[str]
    #: Bytes that the footer of each file takes in memory.
    footers: tuple[int, ...]
    #: Names it in messages.
    name: str


def open_source(
    source: Any,
    columns: Sequence[str] | Schema | None,
    filesystem: Any,
    rules: ColumnConfig,
    *,
    lanes: int | None,
    size: int,
    filters: Any = None,
    storage_options: Mapping[str, Any] | None = None,
    raw: Collection[str] = (),
) -> Source:
    """Find out what there is to read.

    Args:
        source: what :func:`open_table` takes or returned, Dataset (its training part) or Split.
        columns: names, or the schema of a Split; None for all columns.
        filesystem: a Store, or a filesystem of pyarrow or fsspec that paths are paths in; None goes by the URL.
        rules: what to do with columns; ``drop_nulls`` is for paths only.
        lanes: streams that the order is interleaved from; None for the split's own, or for paths ``size``.
        size: number of ranks.
        filters: conditions on rows, for paths only.
        storage_options: arguments for the fsspec filesystem of a URL.
        raw: columns that are kept as they are stored, nulls included.

    Raises:
        DataError: there is nothing to read there, or the arguments do not fit the source.
    """
    if isinstance(source, Dataset):
        schema = source.schema if columns is None else source.schema.select(_names(columns) or ())
        source, columns, filesystem = source.train, schema, filesystem or source.store
    if isinstance(source, Split):
        if not isinstance(columns, Schema) or filesystem is None:
            raise DataError("a Split is read with its Schema as `columns` and its Store as `filesystem`")
        if filters is not None or rules.drop_nulls:
            raise DataError("filters and drop_nulls are for paths: the rows of a Dataset are counted already")
        name = filesystem.prefix if isinstance(filesystem, Store) else "the split"
        split = source if lanes is None else source.with_lanes(lanes)
        texts = frozenset(column.name for column in columns if column.kind in {ColumnKind.STRING, ColumnKind.BINARY})
        found = Source(
            reader=split.reader or ParquetFragments(filesystem),
            schema=rules.applied(columns),
            split=split,
            texts=texts,
            footers=tuple(footers.estimated(split.row_groups, len(columns))),
            name=repr(name),
        )
    else:
        table = open_table(source, filesystem=filesystem, storage_options=storage_options)
        require_one_version(table, source, size, "ranks")
        chosen = TableColumns(table, _names(columns), rules.decode, raw=raw)
        if isinstance(rules.drop_nulls, str):
            raise DataError(
                f"drop_nulls is the text {rules.drop_nulls!r}: give a list of names, or True for all columns"
            )
        valid = chosen.schema.names if rules.drop_nulls is True else rules.drop_nulls or ()
        row_filter = row_filters.parse(filters, valid)
        groups = chosen.row_groups if row_filter is None else chosen.filtered(row_filter)
        _require_filled(groups, {*chosen.schema.names} - {*rules.fill_nulls, *raw})
        schema = chosen.with_lengths(rules.applied(chosen.schema), groups, row_filter)
        rows = sum(group.rows for group in groups)
        split = Split(groups, rows, size if lanes is None else lanes, row_filter, table.reader, table.snapshot)
        found = Source(
            reader=table.reader,
            schema=schema,
            split=split,
            texts=chosen.texts,
            footers=table.footers_bytes,
            name=table.name,
        )
    if not found.split.rows:
        what = " that the filters let through" if found.split.row_filter is not None else ""
        raise DataError(f"there are no rows to read in {found.name}{what}")
    return found


def _require_filled(groups: Sequence[RowGroup], names: Collection[str]) -> None:
    """Refuse columns that whole files lack and that no rule fills.

    Also those that a folder names null.
    """
    nulls: Counter[str] = Counter()
    places: dict[str, str] = {}
    for group in groups:
        for name, value in group.partition:
            if value is None and name in names:
                nulls[name] += group.rows
                places.setdefault(name, group.path)
    if nulls:
        raise DataError(
            "\n".join(
                f"column {name!r} holds {count} null{'s' if count != 1 else ''}, as {places[name]} has no values: "
                f"fill_nulls={{{name!r}: ...}} fills them, drop_nulls=[{name!r}] drops the rows"
                for name, count in nulls.items()
            )
        )


def _names(columns: Sequence[str] | Schema | None) -> Sequence[str] | None:
    if isinstance(columns, str):
        raise DataError(f"columns is the text {columns!r}: give a list of names")
    return columns.names if isinstance(columns, Schema) else columns
