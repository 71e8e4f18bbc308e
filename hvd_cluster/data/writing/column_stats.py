"""What the rows of the used columns hold: nulls and list lengths.

They are counted batch by batch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from hvd_cluster.data.columns import vectors
from hvd_cluster.data.columns.arrow_values import inner_nulls_text, is_list, list_lengths, nulls_text, ragged_text
from hvd_cluster.data.optional import load_pyarrow
from hvd_cluster.data.schema import UNKNOWN, Column, ColumnKind, Schema
from hvd_cluster.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass
class ColumnStats:
    """Counts of one column."""

    #: Rows that are null.
    nulls: int = 0
    #: Nulls inside of lists.
    inner_nulls: int = 0
    #: For each level of lists the lengths seen (two at most: a second shows that they differ).
    lengths: list[list[int]] = field(default_factory=list)

    def add_lengths(self, level: int, lengths: Any) -> None:
        """Remember the lengths of lists, any iterable of ints, at a level of nesting."""
        while len(self.lengths) <= level:
            self.lengths.append([])
        known = self.lengths[level]
        known.extend([int(length) for length in lengths if int(length) not in known][: 2 - len(known)])

    @property
    def is_ragged(self) -> bool:
        """Whether lists of two lengths were seen at one level."""
        return any(len(lengths) > 1 for lengths in self.lengths)


@dataclass
class TableStats:
    """Counts of all columns; travels as JSON from the executors."""

    #: Column name -> what was seen of it.
    columns: dict[str, ColumnStats] = field(default_factory=dict)

    def add(self, batch: pa.RecordBatch | pa.Table, schema: Schema) -> None:
        """Count a batch."""
        pyarrow = load_pyarrow()
        for column in schema:
            seen = self.columns.setdefault(column.name, ColumnStats())
            data = batch.column(column.name)
            for array in data.chunks if isinstance(data, pyarrow.ChunkedArray) else [data]:
                _count(array, column, seen)

    def merge(self, other: TableStats) -> None:
        """Add what other statistics have seen."""
        for name, theirs in other.columns.items():
            ours = self.columns.setdefault(name, ColumnStats())
            ours.nulls += theirs.nulls
            ours.inner_nulls += theirs.inner_nulls
            for level, lengths in enumerate(theirs.lengths):
                ours.add_lengths(level, lengths)

    def problems(self, *, allow_ragged: bool = False, first_rows: int | None = None) -> list[str]:
        """What is wrong with the columns, a sentence each.

        It names the column and the remedy.
        """
        where = "" if first_rows is None else f" in the first {first_rows} rows"
        texts: list[str] = []
        for name, seen in self.columns.items():
            if seen.nulls:
                texts.append(nulls_text(name, seen.nulls, where))
            if seen.inner_nulls:
                texts.append(inner_nulls_text(name, seen.inner_nulls, where))
            if allow_ragged:
                continue
            texts.extend(ragged_text(name, lengths[0], lengths[1]) for lengths in seen.lengths if len(lengths) > 1)
            if seen.lengths and not seen.is_ragged and math.prod(self.shape(name)) == 0:
                texts.append(f"column {name!r} holds only empty lists: leave it out")
        return texts

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one row of a column; UNKNOWN where lengths differ or none was seen."""
        seen = self.columns.get(name, ColumnStats())
        return tuple(lengths[0] if len(lengths) == 1 else UNKNOWN for lengths in seen.lengths)

    def with_lengths(self, schema: Schema) -> Schema:
        """The schema with the lengths that were seen in place of UNKNOWN ones."""
        return Schema(
            tuple(dataclasses.replace(column, shape=self.shape(column.name) or column.shape) for column in schema)
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values for :meth:`from_json`."""
        return {name: [seen.nulls, seen.inner_nulls, seen.lengths] for name, seen in self.columns.items()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> TableStats:
        """The statistics that :meth:`to_json` wrote."""
        return cls({name: ColumnStats(*entry) for name, entry in values.items()})


def _count(array: pa.Array, column: Column, seen: ColumnStats) -> None:
    if column.kind is ColumnKind.OTHER:
        return  # the user's function deals with them
    types = load_pyarrow("pyarrow.types")
    if types.is_dictionary(array.type):
        array = array.dictionary_decode()
    seen.nulls += array.null_count
    if array.null_count:
        array = array.drop_null()
    if column.kind is ColumnKind.VECTOR and types.is_struct(array.type):
        seen.add_lengths(0, np.unique(vectors.lengths(array)))
        return
    if column.kind not in {ColumnKind.LIST, ColumnKind.VECTOR}:
        return
    level = 0
    while is_list(types, array.type):
        fixed = types.is_fixed_size_list(array.type)
        seen.add_lengths(level, [array.type.list_size] if fixed else np.unique(list_lengths(array)))
        array = array.flatten()
        if array.null_count:
            seen.inner_nulls += array.null_count
            array = array.drop_null()
        level += 1


def raise_if_any(problems: list[str]) -> None:
    """Raise a DataError with all problems, one a line, if there are any."""
    if problems:
        raise DataError("\n".join(dict.fromkeys(problems)))
