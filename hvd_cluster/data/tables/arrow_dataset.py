"""``pyarrow.dataset.Dataset`` as a table.

Arrow itself reads its fragments, whatever their file format.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from hvd_cluster.data.cache import source_of
from hvd_cluster.data.files.filesystems import is_local
from hvd_cluster.data.filters import RowFilter, Statistics
from hvd_cluster.data.optional import load_pyarrow
from hvd_cluster.data.reading.common_schema import keeps_values
from hvd_cluster.data.reading.footers import memory_bytes, row_group_bytes
from hvd_cluster.data.reading.hive import Partition
from hvd_cluster.data.reading.parquet_files import NUM_THREADS, leaves_of, statistics_of, tables_above
from hvd_cluster.data.row_group import RowGroup
from hvd_cluster.data.tables.table_source import FragmentReader, TableSource
from hvd_cluster.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa


class ArrowFragments(FragmentReader):
    """A reader of the pieces of a data set's fragments.

    A piece is a row group of a Parquet file, or a whole file of another format.

    Args:
        dataset: a ``pyarrow.dataset.Dataset``.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.types: dict[str, Any] = {}
        found = [(getattr(fragment, "path", "fragment"), fragment) for fragment in dataset.get_fragments()]
        times = Counter(path for path, _ in found)
        #: Path -> fragment.
        self.fragments = {
            path if times[path] == 1 else f"{path} ({number})": fragment
            for number, (path, fragment) in enumerate(found)
        }

    def __getstate__(self) -> dict[str, Any]:
        """Without fragments, which keep the footers that they have read."""
        return {"dataset": self._dataset}

    def __setstate__(self, state: dict[str, Any]) -> None:
        ArrowFragments.__init__(self, **state)

    def file(self, path: str) -> tuple[Any, str]:
        fragment = self.fragments[path]  # a union's are in several filesystems, and one listed twice has two names
        return fragment.filesystem, fragment.path

    def read(
        self, fragments: Sequence[RowGroup], names: Sequence[str], texts: Collection[str]
    ) -> tuple[pa.Table, list[int]]:
        tables = [
            self.piece(fragment.path, fragment.index).to_table(
                schema=self._dataset.schema, columns=list(names), use_threads=False
            )
            for fragment in fragments
        ]
        return load_pyarrow().concat_tables(tables), [table.num_rows for table in tables]

    def piece(self, path: str, index: int) -> Any:
        """A Parquet file's row group as its own fragment, or the whole of another file."""
        fragment = self.fragments[path]
        return fragment.subset(row_group_ids=[index]) if is_parquet(fragment) else fragment

    def source(self, path: str) -> str:
        fragment = self.fragments[path]
        options = getattr(fragment.format, "read_options", None) if is_parquet(fragment) else None
        if options is None:
            settings = str(zlib.crc32(pickle.dumps(fragment.format)))  # how it is parsed
        else:  # pickled, a set would depend on the process
            settings = f"{sorted(options.dictionary_columns)} {options.coerce_int96_timestamp_unit}"
        file = source_of(*self.file(path))
        return f"{file} {settings} {fragment.partition_expression} {self._dataset.schema.remove_metadata()}"

    def shares_memory(self, path: str) -> bool:
        return not is_parquet(self.fragments[path])  # Arrow's own format may be mapped into memory


def is_parquet(fragment: Any) -> bool:
    """Whether a fragment is Parquet, so that its row groups are known."""
    return hasattr(fragment, "row_groups")


class ArrowDataset(TableSource):
    """A ``pyarrow.dataset.Dataset``.

    Raises:
        DataError: it has a filter or columns of its own, its rows are in this process's memory, or its files are those
            of a table and perhaps not live.
    """

    def __init__(self, dataset: Any) -> None:
        try:
            self._reader = ArrowFragments(dataset)
        except ValueError as error:  # it has no fragments then
            raise DataError(
                f"{error} Give the pyarrow data set without its filter, and filters=[(column, operator, value)]"
            ) from error
        self.reader = self._reader
        self.arrow_schema = dataset.schema
        first = next(iter(self._reader.fragments), "no file")
        self.name = f"the pyarrow data set of {first!r}"
        if not all(hasattr(fragment, "path") for fragment in self._reader.fragments.values()):
            raise DataError("the pyarrow data set holds rows in memory: give the pyarrow.Table itself, or write files")
        _require_live_files([*map(self._reader.file, self._reader.fragments)])
        self._footers: dict[str, Any] = {}
        self._types = {field.name: field.type for field in dataset.schema}

    @property
    def footers_bytes(self) -> tuple[int, ...]:
        return tuple(map(memory_bytes, self._footers.values()))

    def fragments(self, names: Sequence[str], row_filter: RowFilter | None = None) -> tuple[RowGroup, ...]:
        groups = []
        for path, fragment in self._reader.fragments.items():
            constants = self._constants(fragment)
            whole = RowGroup(path, 0, 1, partition=constants)
            if row_filter is not None and row_filter.verdict(super().statistics(whole, row_filter.names)) is False:
                continue
            sizes = self._piece_sizes(path, fragment, names)
            groups += [RowGroup(path, index, rows, size_bytes=size) for index, (rows, size) in enumerate(sizes) if rows]
        return tuple(groups)

    def _piece_sizes(self, path: str, fragment: Any, names: Sequence[str]) -> list[tuple[int, int]]:
        """Rows of each piece of a fragment, and bytes of named columns; 0 if unknown."""
        if not is_parquet(fragment):
            return [(fragment.count_rows(), 0)]
        footer = self._footers.setdefault(path, fragment.metadata)
        leaves = [leaf for found in leaves_of(footer, names).values() for leaf in found]
        ids = [row_group.id for row_group in fragment.row_groups]
        if ids != list(range(footer.num_row_groups)):
            raise DataError(f"the pyarrow data set has only row groups {ids} of {path}: give whole files, and filters")
        return [(footer.row_group(index).num_rows, row_group_bytes(footer, index, leaves)) for index in ids]

    def statistics(self, fragment: RowGroup, names: Sequence[str]) -> Callable[[str], Statistics]:
        whole = self._reader.fragments[fragment.path]
        constants = dict(self._constants(whole))
        rows = fragment.rows
        stored = [name for name in names if name not in constants]
        footer = self._footers.get(fragment.path)
        of_stored = None if footer is None else statistics_of(footer, fragment.index, stored)

        def of(name: str) -> Statistics:
            if name in constants:
                value = constants[name]
                return Statistics(rows=rows, nulls=rows if value is None else 0, low=value, high=value)
            if of_stored is None:
                return Statistics(rows=rows)
            found = of_stored(name)
            if found.low is None or keeps_values(whole.physical_schema.field(name).type, self._types[name]):
                return found
            return dataclasses.replace(found, low=None, high=None)

        return of

    @staticmethod
    def _constants(fragment: Any) -> Partition:
        """The columns that the names of the fragment's folders give."""
        keys = load_pyarrow("pyarrow.dataset").get_partition_keys(fragment.partition_expression)
        return tuple(keys.items())


def _require_live_files(files: Sequence[tuple[Any, str]]) -> None:
    """Refuse a table's files unless all of them are live in one version.

    The table lists its live files elsewhere. deltalake makes data sets of the live files, in a filesystem of its own
    that shows the log beside them.
    """
    plain = [
        (filesystem, path)
        for filesystem, path in files
        if not type(getattr(filesystem, "handler", None)).__module__.startswith("deltalake.")
    ]
    folders = {(filesystem.type_name, path.rpartition("/")[0]): filesystem for filesystem, path in plain}
    checked: dict[str, set[str]] = defaultdict(set)
    with ThreadPoolExecutor(NUM_THREADS) as pool:  # object stores are far away
        tables = pool.map(
            lambda one: [(one[1], *table) for table in tables_above(one[1], one[0][1], checked[one[0][0]])],
            folders.items(),
        )
        found = [table for each in tables for table in each]
    for filesystem, root, table_format in found:
        spellings = (os.path.abspath, os.path.realpath) if is_local(filesystem) else ()
        inside = {
            spelling
            for other, path in plain
            if other.type_name == filesystem.type_name
            for spelling in (path, *(of(path) for of in spellings))
            if spelling.startswith(f"{root}/")
        }
        if inside and table_format == "Delta" and is_local(filesystem):
            from hvd_cluster.data.tables import delta

            if delta.are_live(root, inside):
                continue
        raise DataError(
            f"the pyarrow data set has files of the {table_format} table in {root!r}, and it is not known that all of "
            "them are live, without deleted rows, in one version: give the path of the table, or its object in the "
            "format's library"
        )
