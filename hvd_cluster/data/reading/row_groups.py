"""Fragments of a table -> Arrow tables of the rows that are wanted.

What cannot be read is named by file and row group.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from hvd_cluster.data.filters import RowFilter
from hvd_cluster.data.optional import load_pyarrow
from hvd_cluster.data.reading.common_schema import as_type, is_text_dictionary
from hvd_cluster.data.reading.shards import RowRange
from hvd_cluster.data.row_group import RowGroup
from hvd_cluster.data.tables.table_source import FragmentReader, Snapshot, gone_text
from hvd_cluster.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

    from hvd_cluster.data.cache import RowGroupCache


class RowGroupTables:
    """Reads columns of row groups. Several threads may use it at once.

    Args:
        reader: reads the table's fragments.
        names: the columns to read, in the order of the tables' columns.
        row_filter: which rows there are; row groups count these only.
        cache: keeps what was read.
        texts: columns of text or bytes that are read from Parquet as dictionaries: distinct values, and an index for
            each row. They take no more memory than in the file.
        snapshot: the state of the table that is read, for messages.
    """

    def __init__(
        self,
        reader: FragmentReader,
        names: Sequence[str],
        row_filter: RowFilter | None = None,
        cache: RowGroupCache | None = None,
        texts: Collection[str] = (),
        snapshot: Snapshot | None = None,
    ) -> None:
        self._reader = reader
        self._names = list(names)
        self._filter = row_filter
        self._cache = cache
        self._texts = frozenset(texts)
        self._types = reader.types
        self._snapshot = snapshot
        self._sources: dict[str, str] = {}

    def read(self, pieces: Sequence[RowRange]) -> pa.Table:
        """The rows of ranges of one file, one after the other."""
        # Two pieces of one row group may follow each other: it is read once.
        groups = [next(run).row_group for _, run in itertools.groupby(pieces, key=lambda piece: piece.row_group.index)]
        if self._filter is None and self._cache is None:
            table, rows = self._plain(groups)
        else:
            tables = [self.matching(group) for group in groups]
            table, rows = load_pyarrow().concat_tables(tables), [len(one) for one in tables]
        begins = dict(zip((group.index for group in groups), itertools.accumulate(rows, initial=0), strict=False))
        places = [begins[piece.row_group.index] + piece.row_group.start + piece.start for piece in pieces]
        ends = list(itertools.accumulate((piece.rows for piece in pieces), initial=0))
        if ends.pop() == table.num_rows and places == ends:  # all of it, and in its own order
            return table
        slices = [table.slice(place, piece.rows) for place, piece in zip(places, pieces, strict=True)]
        if sum(map(len, slices)) != sum(piece.rows for piece in pieces):
            raise DataError(f"{pieces[0].row_group.place} has changed since the reader was made: make a new one")
        return load_pyarrow().concat_tables(slices)

    def shares_memory(self, path: str) -> bool:
        """Whether a file's tables share memory with other readers.

        If so, nothing must be written to it.
        """
        return self._cache is not None or self._reader.shares_memory(path)

    def matching(self, group: RowGroup, begin: int = 0, end: int | None = None) -> pa.Table:
        """The rows of a row group that the filter lets through, perhaps cached.

        Args:
            group: read as a whole.
            begin, end: the rows of it that count, before the filter; None for the last.
        """
        if self._cache is None:
            return self._filtered(group, begin, end)
        texts = tuple(name for name in self._names if name in self._texts)
        source = self._source(group) if end is None else f"{self._source(group)} rows {begin} to {end}"
        # In another state of the table this file may have other rows, names, constants and types.
        wanted = {*self._names, *(self._filter.names if self._filter is not None else ())}
        constants = [pair for pair in group.partition if pair[0] in wanted]
        types = [f"{name}: {self._types[name]}" for name in sorted(wanted) if name in self._types]
        source += f" {zlib.crc32(group.deleted)} {group.stored_names} {constants} {types}"
        key = (source, group.index, tuple(self._names), texts, self._filter)
        return self._cache.get(key, lambda: self._filtered(group, begin, end))

    def _source(self, group: RowGroup) -> str:
        """Name a row group's file as it is now.

        One that changes is another source to a reader that is made afterwards.
        """
        if group.path not in self._sources:
            try:
                self._sources[group.path] = self._reader.source(group.path)
            except FileNotFoundError as error:
                raise DataError(self._gone_text(group, error)) from error
            except OSError as error:
                raise DataError(f"cannot read {group.place}: its size and time cannot be read: {error}") from error
        return self._sources[group.path]

    def _gone_text(self, group: RowGroup, error: Exception) -> str:
        if self._snapshot is None:
            return f"cannot read {group.place}: there is no such file any more: {error}"
        return gone_text(self._snapshot, f"{group.path}: {error}")

    def _filtered(self, group: RowGroup, begin: int, end: int | None) -> pa.Table:
        wanted = list(dict.fromkeys([*self._names, *(self._filter.names if self._filter is not None else ())]))
        table, _ = self._plain([group], wanted)
        if end is not None:
            table = table.slice(begin, end - begin)
        return table if self._filter is None else table.filter(self._filter.mask(table)).select(self._names)

    def _plain(self, groups: Sequence[RowGroup], names: Sequence[str] | None = None) -> tuple[pa.Table, list[int]]:
        """Whole row groups of one file, and the number of rows of each.

        Their rows come one after the other.
        """
        names = self._names if names is None else names
        path, constants = groups[0].path, dict(groups[0].partition)
        stored = [name for name in names if name not in constants]
        try:
            table, rows = self._reader.read(groups, stored, self._texts)
        except FileNotFoundError as error:
            raise DataError(self._gone_text(groups[0], error)) from error
        except (OSError, ValueError, IndexError, NotImplementedError) as error:
            reason = " ".join(str(error).split())  # Parquet's own may be of several lines
            raise DataError(
                f"cannot read {groups[0].place}: {reason}; the file may be damaged, half-written, removed, or "
                "changed since the reader was made: write the data again, or make a new reader"
            ) from error
        missing = [name for name in stored if name not in table.column_names]
        if missing:
            raise DataError(f"{path} lacks the columns {missing}")
        for index, column in enumerate(table.columns):
            if _hides_nulls(column):
                table = table.set_column(index, table.column_names[index], _with_null_rows(column))
        if constants or self._types:
            columns = [
                self._constant(constants[name], sum(rows), name, path)
                if name in constants
                else self._typed(table.column(name), name, path)
                for name in names
            ]
            table = load_pyarrow().table(columns, names=list(names)) if columns else table
        return (table if table.column_names == list(names) else table.select(names)), rows

    def _typed(self, array: Any, name: str, path: str) -> Any:
        return self._encoded(as_type(array, self._types[name], name, path), name) if name in self._types else array

    def _constant(self, value: Any, rows: int, name: str, path: str) -> Any:
        """A column of one value, in the type and layout of files which hold it."""
        pyarrow = load_pyarrow()
        array = pyarrow.chunked_array([pyarrow.repeat(pyarrow.scalar(value), rows)])
        return self._encoded(self._typed(array, name, path), name)

    def _encoded(self, array: Any, name: str) -> Any:
        """A column as dictionaries in one type, if files of another type have such."""
        if not load_pyarrow("pyarrow.types").is_dictionary(array.type):
            is_encoded = name in self._texts or is_text_dictionary(self._types.get(name))
            return array.dictionary_encode() if is_encoded else array
        return _with_int32_indices(array) if is_text_dictionary(array.type) else array


def _with_int32_indices(array: Any) -> Any:
    """Dictionaries as Arrow makes them.

    Those of pandas have the narrowest indices, and may be ordered.
    """
    pyarrow = load_pyarrow()
    wanted = pyarrow.dictionary(pyarrow.int32(), array.type.value_type)
    if array.type == wanted:
        return array
    chunks = [
        pyarrow.DictionaryArray.from_arrays(chunk.indices.cast(pyarrow.int32()), chunk.dictionary)
        for chunk in array.chunks
    ]
    return pyarrow.chunked_array(chunks, type=wanted)


def _hides_nulls(array: Any) -> bool:
    """Whether the distinct values of an array hold a null.

    The ``null_count`` of a ``pyarrow.ChunkedArray`` does not count it.
    """
    is_dictionary = load_pyarrow("pyarrow.types").is_dictionary(array.type)
    return is_dictionary and any(chunk.dictionary.null_count for chunk in array.chunks)


def _with_null_rows(array: Any) -> Any:
    """Dictionaries with null indices where the distinct value is null."""
    pyarrow, compute = load_pyarrow(), load_pyarrow("pyarrow.compute")
    missing = pyarrow.scalar(None, array.type.index_type)
    chunks = [
        pyarrow.DictionaryArray.from_arrays(
            compute.if_else(chunk.dictionary.is_valid().take(chunk.indices), chunk.indices, missing),
            chunk.dictionary,
            ordered=array.type.ordered,
        )
        for chunk in array.chunks
    ]
    return pyarrow.chunked_array(chunks, type=array.type)
