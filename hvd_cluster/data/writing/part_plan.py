"""What the writers of all partitions of a data set need to know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hvd_cluster.data.reading.row_groups import ARROW_SUFFIX
from hvd_cluster.data.schema import Schema
from hvd_cluster.data.store import Store

#: How names of files end, by format.
SUFFIXES = {"parquet": ".parquet", "arrow": ARROW_SUFFIX}

#: Rows of a row group at most: small enough to share and shuffle, large enough to decode at full speed.
MAX_GROUP_ROWS = 32768
#: Bytes of a row group at most, decoded.
MAX_GROUP_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class PartPlan:
    """What the writers of all partitions need to know. Pickles."""

    #: Where the files go.
    store: Store
    #: The columns to write; list lengths may be UNKNOWN.
    schema: Schema
    #: Folders inside the store's filesystem.
    train_folder: str
    validation_folder: str
    #: None, a ratio, or the name of the column that marks rows for validation.
    validation: float | str | None
    #: Of the draw by ratio.
    seed: int = 0
    #: Rows of a row group at most.
    group_rows: int = MAX_GROUP_ROWS
    #: Lists may differ in length; they are then written as they are.
    allow_ragged: bool = False
    #: What is wrong with the columns already: nothing is written then, but nulls are counted, to name all at once.
    wrong: tuple[str, ...] = ()
    #: "parquet", or "arrow" for files that are mapped into memory, on a local disk.
    format: Literal["parquet", "arrow"] = "parquet"
    #: Whether the writers make the folders; False where somebody has made them, and takes them away when nobody wants
    #: the files any more: a writer that has not heard of it must not make them anew.
    makes_folders: bool = True

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders that will be written."""
        return (self.train_folder,) if self.validation is None else (self.train_folder, self.validation_folder)
