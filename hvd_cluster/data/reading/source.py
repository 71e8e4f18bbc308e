"""What a reader is given (paths, URLs, a data set, a split) -> the row groups to read, their schema and filesystem."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvd_cluster.data import filters as row_filters
from hvd_cluster.data.columns.column_config import ColumnConfig
from hvd_cluster.data.dataset import Dataset, RowGroup, Split
from hvd_cluster.data.files.filesystems import as_filesystem, normalize
from hvd_cluster.data.reading import footers
from hvd_cluster.data.reading.parquet import ParquetFolder, files_of
from hvd_cluster.data.schema import Kind, Schema
from hvd_cluster.data.store import Store
from hvd_cluster.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Source:
    """Row groups that can be read."""

    #: The ``pyarrow.fs.FileSystem`` that serves their paths.
    filesystem: Any
    #: The columns to read, in the shapes that rules declare.
    schema: Schema
    #: The row groups, the rows that are wanted of them, and the lanes that they are read in.
    split: Split
    #: Columns of text or bytes.
    texts: frozenset[str]
    #: Column -> Arrow type that tables of every file get, where files differ.
    types: dict[str, Any]
    #: Bytes that each file's footer takes in memory.
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
        source: path, URL, list of such, Dataset (its training part) or Split.
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
        texts = frozenset(column.name for column in columns if column.kind in {Kind.STRING, Kind.BINARY})
        found = Source(
            filesystem=as_filesystem(filesystem),
            schema=rules.applied(columns),
            split=split,
            texts=texts,
            types={},
            footers=tuple(footers.estimated(split.row_groups, len(columns))),
            name=repr(name),
        )
    else:
        opened, paths = _open_paths(source, filesystem, storage_options)
        name = repr(source if isinstance(source, (str, os.PathLike)) else paths[0])
        listed = not isinstance(source, (str, os.PathLike))
        folder = ParquetFolder(opened, files_of(opened, paths, listed=listed), _names(columns), rules.decode, raw=raw)
        if isinstance(rules.drop_nulls, str):
            raise DataError(
                f"drop_nulls is the text {rules.drop_nulls!r}: give a list of names, or True for all columns"
            )
        valid = folder.schema.names if rules.drop_nulls is True else rules.drop_nulls or ()
        row_filter = row_filters.parse(filters, valid)
        groups = folder.row_groups if row_filter is None else folder.filtered(row_filter)
        _require_filled(groups, {*folder.schema.names} - {*rules.fill_nulls, *raw})
        schema = folder.with_lengths(rules.applied(folder.schema))
        rows = sum(group.rows for group in groups)
        split = Split(groups, rows, size if lanes is None else lanes, row_filter)
        found = Source(
            filesystem=opened,
            schema=schema,
            split=split,
            texts=folder.texts,
            types=folder.types,
            footers=folder.footers_bytes,
            name=name,
        )
    if not found.split.rows:
        what = " that the filters let through" if found.split.row_filter is not None else ""
        raise DataError(f"there are no rows to read in {found.name}{what}")
    return found


def _require_filled(groups: Sequence[RowGroup], names: Collection[str]) -> None:
    """Refuse columns that whole files lack, or that a folder names null, and that no rule fills."""
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


def _open_paths(source: Any, filesystem: Any, storage_options: Mapping[str, Any] | None) -> tuple[Any, list[str]]:
    """The filesystem of one or several paths, and the paths inside it."""
    several = [source] if isinstance(source, (str, os.PathLike)) else list(source) if _is_list(source) else []
    if not several or not all(isinstance(path, (str, os.PathLike)) for path in several):
        # The type, and not all rows of a DataFrame.
        shown = repr(source) if _is_list(source) and not several else f"data of type {type(source).__name__}"
        raise DataError(f"cannot read {shown}: give a path or URL of Parquet data, a list of such, or a Dataset")
    if filesystem is None:
        store = Store.create(several[0], storage_options=storage_options)
        return store.fs, [store.get_localized_path(normalize(path)) for path in several]
    if isinstance(filesystem, Store):
        return filesystem.fs, [filesystem.get_localized_path(normalize(path)) for path in several]
    return as_filesystem(filesystem), [os.fspath(path).rstrip("/") for path in several]


def _is_list(source: Any) -> bool:
    return isinstance(source, Sequence) and not isinstance(source, (bytes, bytearray))
