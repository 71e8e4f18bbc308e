"""A data set that is ready to train on, as values that travel to every worker."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from hvd_cluster.data.schema import Schema
from hvd_cluster.data.store import Store

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RowGroup:
    """Rows of one Parquet row group: all of it, or one contiguous piece."""

    #: Path of the file inside the store's filesystem.
    path: str
    #: Index of the row group in the file.
    index: int
    #: Number of rows meant, >= 1.
    rows: int
    #: The first row meant, counted from the row group's own first row.
    start: int = 0
    #: Bytes of these rows as Parquet holds them before compression; 0 when not known.
    size_bytes: int = 0


@dataclass(frozen=True)
class Split:
    """The training part or the validation part of a data set."""

    #: The row groups, in the order of the data.
    row_groups: tuple[RowGroup, ...]
    #: Rows over all row groups.
    rows: int
    #: Streams that the epoch's order is woven from, so that this many ranks (or a divisor or multiple of it) each read
    #: a part of the row groups only; see :mod:`hvd_cluster.data.shards`.
    lanes: int = 1


@dataclass(frozen=True)
class Dataset:
    """Parquet files in a store, their schema, and how they split."""

    #: The store whose filesystem holds the files.
    store: Store
    #: The columns that were asked for; every shape is known.
    schema: Schema
    #: What to train on.
    train: Split
    #: What to validate on, if anything.
    validation: Split | None = None
    #: Folders inside the store's filesystem that were written for this data set; empty for Parquet used in place.
    folders: tuple[str, ...] = ()

    def remove(self) -> None:
        """Delete the intermediate files. Parquet used in place stays. Calling it again does nothing."""
        for folder in self.folders:
            self.store.delete(folder)
        if self.folders:
            logger.debug("removed %s", ", ".join(self.folders))
