"""Row groups of files -> Arrow tables: Parquet anywhere, Arrow files on the local disk.

What cannot be read is named by file and row group.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hvd_cluster.data.cache import source_of
from hvd_cluster.data.dataset import RowGroup
from hvd_cluster.data.files.retry import retried
from hvd_cluster.data.filters import RowFilter
from hvd_cluster.data.optional import load_pyarrow
from hvd_cluster.data.reading.common_schema import as_type
from hvd_cluster.data.reading.footers import FooterCache
from hvd_cluster.data.reading.shards import RowRange
from hvd_cluster.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

    from hvd_cluster.data.cache import RowGroupCache

#: Files of this name are Arrow's own format, mapped into memory; all others are Parquet.
ARROW_SUFFIX = ".arrow"


class RowGroupTables:
    """Reads columns of row groups. Several threads may use it at once; it remembers the last files' footers.

    Args:
        filesystem: the ``pyarrow.fs.FileSystem`` that serves the paths.
        names: the columns to read, in the order of the tables' columns.
        row_filter: which rows there are; row groups count these only.
        cache: keeps what was read.
        texts: columns of text or bytes that are read from Parquet as dictionaries: distinct values, and an index for
            each row. They take no more memory than in the file.
        types: column -> the Arrow type that tables of every file get; others stay as they are stored.
    """

    def __init__(
        self,
        filesystem: Any,
        names: Sequence[str],
        row_filter: RowFilter | None = None,
        cache: RowGroupCache | None = None,
        texts: Collection[str] = (),
        types: Mapping[str, Any] | None = None,
    ) -> None:
        self._filesystem = filesystem
        self._names = list(names)
        self._filter = row_filter
        self._cache = cache
        self._texts = frozenset(texts)
        self._types = dict(types or {})
        self._footers = FooterCache()
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
        """Whether tables of this file share memory with other readers, so that it must not be written to."""
        return self._cache is not None or path.endswith(ARROW_SUFFIX)

    def matching(self, group: RowGroup, begin: int = 0, end: int | None = None) -> pa.Table:
        """The rows of a row group that the filter lets through, from the cache where they are kept.

        Args:
            group: read as a whole.
            begin, end: the rows of it that count, before the filter; None for the last.
        """
        if self._cache is None:
            return self._filtered(group, begin, end)
        texts = tuple(name for name in self._names if name in self._texts)
        # Files that come later may give a column another type.
        names = tuple(f"{name}: {self._types[name]}" if name in self._types else name for name in self._names)
        source = self._source(group) if end is None else f"{self._source(group)} rows {begin} to {end}"
        key = (source, group.index, names, texts, self._filter)
        return self._cache.get(key, lambda: self._filtered(group, begin, end))

    def _source(self, group: RowGroup) -> str:
        """Its file as it is now: one that changes is another source to a reader that is made afterwards."""
        if group.path not in self._sources:
            try:
                self._sources[group.path] = source_of(self._filesystem, group.path)
            except OSError as error:
                raise DataError(f"cannot read {group.place}: its size and time cannot be read: {error}") from error
        return self._sources[group.path]

    def _filtered(self, group: RowGroup, begin: int, end: int | None) -> pa.Table:
        wanted = list(dict.fromkeys([*self._names, *(self._filter.names if self._filter is not None else ())]))
        table, _ = self._plain([group], wanted)
        if end is not None:
            table = table.slice(begin, end - begin)
        return table if self._filter is None else table.filter(self._filter.mask(table)).select(self._names)

    def _plain(self, groups: Sequence[RowGroup], names: Sequence[str] | None = None) -> tuple[pa.Table, list[int]]:
        """Whole row groups of one file, one after the other, and the number of rows of each."""
        names = self._names if names is None else names
        path, constants = groups[0].path, dict(groups[0].partition)
        stored = [name for name in names if name not in constants]
        indices = [group.index for group in groups]
        read = self._arrow if path.endswith(ARROW_SUFFIX) else self._parquet
        try:
            table, rows = retried(
                lambda: read(path, indices, stored), self._filesystem, f"reading {groups[0].place}", warns=False
            )
        except FileNotFoundError as error:
            raise DataError(f"cannot read {groups[0].place}: there is no such file any more: {error}") from error
        except (OSError, ValueError, IndexError, NotImplementedError) as error:
            reason = " ".join(str(error).split())  # Parquet's own may be of several lines
            raise DataError(
                f"cannot read {groups[0].place}: {reason}; the file may be damaged, half-written, removed, or "
                "changed since the reader was made: write the data again, or make a new reader"
            ) from error
        missing = [name for name in stored if name not in table.column_names]
        if missing:
            raise DataError(f"{path} lacks the columns {missing}")
        for name in names:
            if name in constants:
                table = table.append_column(name, _constant(constants[name], table.num_rows))
            if name in self._types:
                place = table.column_names.index(name)
                typed = as_type(table.column(place), self._types[name], name, path)
                table = table.set_column(place, name, typed)
        return (table if table.column_names == list(names) else table.select(names)), rows

    def _parquet(self, path: str, indices: Sequence[int], names: Sequence[str]) -> tuple[pa.Table, list[int]]:
        parquet = load_pyarrow("pyarrow.parquet")
        # No threads of Arrow's own: ours run side by side already, and their number is what the user chose.
        with self._filesystem.open_input_file(path) as stream:
            footer = self._footers.get(path, lambda: parquet.read_metadata(stream))
            file = parquet.ParquetFile(
                stream,
                metadata=footer,
                read_dictionary=[name for name in names if name in self._texts],
                pre_buffer=True,
                page_checksum_verification=True,
            )
            table = file.read_row_groups(indices, columns=list(names), use_threads=False)
            return table, [footer.row_group(index).num_rows for index in indices]

    def _arrow(self, path: str, indices: Sequence[int], names: Sequence[str]) -> tuple[pa.Table, list[int]]:
        pyarrow, ipc = load_pyarrow(), load_pyarrow("pyarrow.ipc")
        with ipc.open_file(pyarrow.memory_map(path)) as file:
            batches = [file.get_batch(index) for index in indices]
        return pyarrow.Table.from_batches(batches).select(list(names)), [batch.num_rows for batch in batches]


def _constant(value: int | str | None, rows: int) -> Any:
    """A column that has one value; of Arrow's null type where that is null."""
    pyarrow = load_pyarrow()
    return pyarrow.chunked_array([pyarrow.repeat(pyarrow.scalar(value), rows)])
