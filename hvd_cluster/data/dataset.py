"""A data set that is ready to train on, as values that travel to every worker."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hvd_cluster.data.filters import RowFilter
from hvd_cluster.data.row_group import RowGroup
from hvd_cluster.data.schema import Column, ColumnKind, Schema
from hvd_cluster.data.store import Store

if TYPE_CHECKING:
    from hvd_cluster.data.tables.table_source import FragmentReader, Snapshot

logger = logging.getLogger(__name__)

#: Name of the file that describes a data set, in the folder of its training part.
MANIFEST = "_dataset.json"
#: Of what is written, manifest and rows: a change of it makes new names (`content_address`) too.
MANIFEST_VERSION = 1


@dataclass(frozen=True)
class Split:
    """The training part or the validation part of a data set."""

    #: The row groups, in the order of the data.
    row_groups: tuple[RowGroup, ...]
    #: Rows over all row groups.
    rows: int
    #: Streams that are interleaved to an epoch's order, so that this many ranks (or a divisor or multiple of it) each
    #: read only a part of the row groups; see :mod:`hvd_cluster.data.reading.shards`.
    lanes: int = 1
    #: Which rows of the row groups are there; None for all.
    row_filter: RowFilter | None = None
    #: Reads the row groups; None for files of the data set's store.
    reader: FragmentReader | None = field(default=None, compare=False)
    #: The state of the table that the rows are from, if it is of a format that has such.
    snapshot: Snapshot | None = None

    @classmethod
    def of(cls, row_groups: Iterable[RowGroup], lanes: int = 1, row_filter: RowFilter | None = None) -> Split:
        """All rows of some row groups."""
        groups = tuple(row_groups)
        return cls(groups, sum(group.rows for group in groups), lanes, row_filter)

    def with_lanes(self, lanes: int) -> Split:
        """The same rows for another number of streams."""
        return self if lanes == self.lanes else replace(self, lanes=lanes)

    def first(self, rows: int, max_bytes: int) -> Split:
        """The first row groups, up to ``rows`` rows or ``max_bytes`` bytes.

        At least one row.
        """
        count = found = size_bytes = 0
        for group in self.row_groups:
            if found and (found >= rows or size_bytes >= max_bytes):
                break
            count, found, size_bytes = count + 1, found + group.rows, size_bytes + group.read_bytes
        return replace(self, row_groups=self.row_groups[:count], rows=found, lanes=1)

    def to_json(self) -> dict[str, Any]:
        """Plain values for :meth:`from_json`."""
        groups = [[group.path, group.index, group.rows, group.size_bytes] for group in self.row_groups]
        return {"rows": self.rows, "lanes": self.lanes, "row_groups": groups}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Split:
        """The split that :meth:`to_json` described."""
        groups = (RowGroup(path, index, rows, size_bytes=size) for path, index, rows, size in values["row_groups"])
        return cls(tuple(groups), values["rows"], values["lanes"])


@dataclass(frozen=True)
class Dataset:
    """Files in a store, their schema, and how they split."""

    #: The store whose filesystem holds the files.
    store: Store
    #: The columns that were asked for; every shape is known.
    schema: Schema
    #: What to train on.
    train: Split
    #: What to validate on, if anything.
    validation: Split | None = None
    #: Folders inside the store's filesystem that were written for this data set and are its own; empty for Parquet used
    #: in place and for what other data sets may use too.
    folders: tuple[str, ...] = ()

    def remove(self) -> None:
        """Delete the intermediate files; Parquet used in place stays.

        Calling it again does nothing.
        """
        for folder in self.folders:
            self.store.delete(folder)
        if self.folders:
            logger.debug("removed %s", ", ".join(self.folders))

    def save(self, folder: str) -> None:
        """Write the manifest into a folder of the store.

        With it another process need not look at the data.
        """
        content = {
            "version": MANIFEST_VERSION,
            "columns": [[c.name, c.kind.value, c.dtype, c.shape, c.unit] for c in self.schema],
            "train": self.train.to_json(),
            "validation": None if self.validation is None else self.validation.to_json(),
        }
        self.store.write(f"{folder}/{MANIFEST}", json.dumps(content))

    @classmethod
    def load(cls, store: Store, folder: str) -> Dataset | None:
        """The data set that the manifest in a folder describes, or None.

        None without a manifest, or if a file is missing.
        """
        try:
            content = json.loads(store.read(f"{folder}/{MANIFEST}"))
        except FileNotFoundError:
            return None
        if content.get("version") != MANIFEST_VERSION:
            return None
        columns = tuple(
            Column(name, ColumnKind(kind), dtype, tuple(shape), unit)
            for name, kind, dtype, shape, unit in content["columns"]
        )
        train, held_out = Split.from_json(content["train"]), content["validation"]
        validation = None if held_out is None else Split.from_json(held_out)
        groups = [*train.row_groups, *(validation.row_groups if validation is not None else ())]
        paths = {group.path for group in groups}
        existing = {path for parent in {path.rsplit("/", 1)[0] for path in paths} for path in store.list(parent)}
        return cls(store, Schema(columns), train, validation) if paths <= existing else None
