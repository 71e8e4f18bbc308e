"""Parquet files of one Delta or Iceberg snapshot, as the format's log lists them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_cluster.data.filters import RowFilter, Statistics
from hvd_cluster.data.optional import load_pyarrow
from hvd_cluster.data.reading.parquet_files import footers_of
from hvd_cluster.data.tables.parquet import DataFile, ParquetFragments, ParquetTable
from hvd_cluster.data.tables.table_source import Snapshot, gone_text
from hvd_cluster.errors import DataError

#: The name under which pyarrow keeps the id of a Parquet field.
FIELD_ID = b"PARQUET:field_id"
#: Where a log does not say how many rows a file holds.
UNKNOWN_ROWS = -1


@dataclass(frozen=True, kw_only=True)
class ListedFile:
    """What a log says about a data file."""

    #: Path inside the filesystem.
    path: str
    #: Rows that it holds, deleted ones included; or UNKNOWN_ROWS.
    rows: int
    #: Column -> the value of all its rows, whatever the file itself holds.
    constants: Mapping[str, Any] = field(default_factory=dict)
    #: Column -> the value of all its rows where the file does not hold the column.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    #: Column -> bounds and nulls of its values; others are not known.
    statistics: Mapping[str, Statistics] = field(default_factory=dict)
    #: Numbers of the rows that are deleted, ascending, each once; None for none.
    deleted: npt.NDArray[np.int64] | None = None
    #: What the format's own rules decide by.
    partition: Any = None

    def statistics_of(self, name: str) -> Statistics:
        """What is known of a column."""
        if name in self.constants:
            value = self.constants[name]
            return Statistics(rows=self.rows, nulls=self.rows if value is None else 0, low=value, high=value)
        return self.statistics.get(name, Statistics(rows=self.rows))


def field_ids(schema: Any) -> dict[int, str]:
    """Id -> name of the fields of a file's ``pyarrow.Schema`` that have one."""
    return {int(one.metadata[FIELD_ID]): one.name for one in schema if FIELD_ID in (one.metadata or {})}


@dataclass(frozen=True, kw_only=True)
class FieldNames:
    """How files call the columns of a table: by the id of a field, or by its name."""

    #: Column -> the names that it may have in a file, where ids do not decide.
    names: Mapping[str, tuple[str, ...]]
    #: Column -> id of its field, for files whose fields have ids.
    ids: Mapping[str, int] | None = None
    #: Column of structs, lists or maps -> its Arrow type with the ids of the fields in it.
    nested: Mapping[str, Any] = field(default_factory=dict)
    #: Ids of the fields inside of columns that are not null in files which lack them.
    filled: Collection[int] = ()

    def stored_in(self, schema: Any) -> dict[str, str]:
        """Column -> its name in a file with this ``pyarrow.Schema``, if the file has it.

        Raises:
            ValueError: the file's fields have no ids, and no names stand for them.
        """
        if self.ids is not None:
            by_id = field_ids(schema)
            if by_id:
                return {name: by_id[number] for name, number in self.ids.items() if number in by_id}
            if not self.names:
                raise ValueError("its fields have no ids, and the table has no mapping of names to ids")
        existing = set(schema.names)
        return {
            name: stored
            for name, choices in self.names.items()
            for stored in [next((choice for choice in choices if choice in existing), None)]
            if stored is not None
        }


def _has_other_fields(wanted: Any, stored: Any, filled: Collection[int]) -> bool:
    """Whether a nested type may have other fields under the names of the table's.

    A field that the file lacks is null in its rows, which the cast to the table's type does, unless its id is among
    ``filled``.
    """
    types = load_pyarrow("pyarrow.types")
    if types.is_struct(wanted) and types.is_struct(stored):
        ids, names = field_ids(stored), {one.name for one in stored}
        return not ids or any(
            ids[number] != name or _has_other_fields(wanted.field(name).type, stored.field(name).type, filled)
            if number in ids
            else name in names or number in filled
            for number, name in field_ids(wanted).items()
        )
    children = [[one.field(index).type for index in range(one.num_fields)] for one in (wanted, stored)]
    return len(children[0]) != len(children[1]) or any(
        _has_other_fields(one, other, filled) for one, other in zip(*children, strict=True)
    )


class SnapshotFiles(ParquetTable):
    """A snapshot whose rows are in Parquet files.

    Footers are read when row groups are needed.

    Args:
        place: the Store or ``pyarrow.fs.FileSystem`` that serves the files.
        arrow_schema: ``pyarrow.Schema`` of the table.
        snapshot: which state of the table it is.
        files: what its log lists, in an order that every process finds.
        fields: how files call the columns.
        refused: column -> why it cannot be read.
    """

    def __init__(
        self,
        place: Any,
        arrow_schema: Any,
        snapshot: Snapshot,
        files: Sequence[ListedFile],
        fields: FieldNames,
        refused: Mapping[str, str] | None = None,
    ) -> None:
        self.name = str(snapshot)
        self.arrow_schema = arrow_schema
        self.snapshot: Snapshot = snapshot
        self.reader: ParquetFragments = ParquetFragments(place, {one.name: one.type for one in arrow_schema})
        self.footers = {}
        self._listed = list(files)
        self._fields = fields
        self._refused = dict(refused or {})

    def require(self, names: Sequence[str]) -> None:
        super().require(names)
        if wrong := [
            f"column {name!r} of {self.name}: {self._refused[name]}" for name in names if name in self._refused
        ]:
            raise DataError("\n".join(wrong))

    def files(self, names: Sequence[str], row_filter: RowFilter | None) -> Sequence[DataFile]:
        may_match = self.may_match(row_filter)
        chosen = [
            file
            for file in self._listed
            if (file.deleted is None or len(file.deleted) != file.rows) and may_match(file)
        ]
        unread = [file.path for file in chosen if file.path not in self.footers]
        try:
            self.footers.update(zip(unread, footers_of(self.reader.filesystem, unread), strict=True))
        except DataError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                raise DataError(gone_text(self.snapshot, str(error.__cause__))) from error
            raise
        return [self._data_file(file, names) for file in chosen]

    def may_match(self, row_filter: RowFilter | None) -> Callable[[ListedFile], bool]:
        """What decides, without opening it, whether a file may have rows that match."""
        return lambda file: row_filter is None or row_filter.verdict(file.statistics_of) is not False

    def _data_file(self, file: ListedFile, names: Sequence[str]) -> DataFile:
        footer = self.footers[file.path]
        if footer.num_rows != file.rows != UNKNOWN_ROWS:
            raise DataError(
                f"{file.path} holds {footer.num_rows} rows, but the log of {self.name} says {file.rows}: it was "
                "changed or damaged; restore it, or read another version"
            )
        schema = footer.schema.to_arrow_schema()
        try:
            stored = self._fields.stored_in(schema)
        except ValueError as error:
            raise DataError(f"cannot read {file.path} of {self.name}: {error}") from error
        for name in names:
            wanted = self._fields.nested.get(name)
            if wanted is None or name not in stored:
                continue
            if _has_other_fields(wanted, schema.field(stored[name]).type, self._fields.filled):
                raise DataError(
                    f"column {name!r} of {self.name}: its fields have other names or defaults in {file.path}, which is "
                    "not supported: leave the column out, or read the table with Spark"
                )
        lacking = {
            name: file.defaults.get(name)
            for name in self.arrow_schema.names
            if name not in stored and name not in file.constants
        }
        return DataFile(
            path=file.path,
            constants=tuple({**file.constants, **lacking}.items()),
            stored_names=tuple(
                (name, other) for name, other in stored.items() if name != other and name not in file.constants
            ),
            deleted=file.deleted,
        )
