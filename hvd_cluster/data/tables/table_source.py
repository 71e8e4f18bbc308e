"""What a table format implements: columns, fragments, and reading in the workers."""

from __future__ import annotations

import datetime as dt
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hvd_cluster.data.filters import RowFilter, Statistics
from hvd_cluster.data.schema import Column, missing_columns_text
from hvd_cluster.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

    from hvd_cluster.data.row_group import RowGroup

EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)


def epoch_ms(moment: dt.datetime) -> int:
    """Whole milliseconds from 1970 to a time with a zone."""
    return (moment - EPOCH) // dt.timedelta(milliseconds=1)


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """One state of a table, which no later commit changes."""

    #: Name of the format, such as "Delta".
    format: str
    #: Path or name of the table.
    table: str
    #: What the format calls this state: a version, or the id of a snapshot.
    version: str
    #: Identifies the table wherever it is: one that was made again in the same place has another.
    table_id: str

    def __str__(self) -> str:
        return f"version {self.version} of the {self.format} table {self.table!r}"

    @property
    def key(self) -> str:
        """The state as a string that does not depend on the place of the table."""
        return f"{self.format} {self.table_id} version {self.version}"


def gone_text(snapshot: Snapshot, what: str) -> str:
    """What to say of a snapshot of which a file is gone.

    Args:
        snapshot: the state of the table.
        what: the file, or the error that names it.
    """
    return (
        f"cannot read {snapshot}: a file of it is gone, probably since the table was vacuumed or its snapshots were "
        f"expired: {what}. Read a newer version, and let the table keep files for as long as trainings take"
    )


class FragmentReader(ABC):
    """A reader of fragments of one table.

    It is pickled to the workers; several threads may use it at once.
    """

    #: Column -> the Arrow type that it gets; others stay as they are stored.
    types: dict[str, Any]
    #: Whether a process may read that was forked from one which has read.
    can_fork = True

    def file(self, path: str) -> tuple[Any, str] | None:
        """The ``pyarrow.fs.FileSystem`` and the path of a fragment's file, or None.

        It is None if the fragment's path is not that of a file.
        """
        return None

    @abstractmethod
    def read(
        self, fragments: Sequence[RowGroup], names: Sequence[str], texts: Collection[str]
    ) -> tuple[pa.Table, list[int]]:
        """The live rows of one file's whole fragments, in order, and their counts.

        Args:
            fragments: what to read; their ``start`` and ``rows`` do not matter.
            names: columns that the fragments do not give one value to.
            texts: columns of text or bytes that may be read as dictionaries.

        Returns:
            A table of the columns that are there, in any order and in the types in which they are stored.

        Raises:
            FileNotFoundError: a file is gone.
            OSError, ValueError, IndexError, NotImplementedError: it cannot be read.
        """

    def source(self, path: str) -> str:
        """A file as it is now and how it is read, for keys of caches and names of copies.

        Raises:
            OSError: what the filesystem says.
        """
        return path

    def shares_memory(self, path: str) -> bool:
        """Whether a file's tables share memory with others and must not be written to."""
        return False


class TableSource(ABC):
    """The live rows of a table, or of one snapshot of it. It can be pickled.

    ``fragments`` says which pieces of the table there are, and ``reader`` reads them.
    """

    #: Names it in messages.
    name: str
    #: ``pyarrow.Schema`` of the rows.
    arrow_schema: Any
    #: Reads the fragments.
    reader: FragmentReader
    #: Which state of the table this is, if the format has such.
    snapshot: Snapshot | None = None

    @abstractmethod
    def fragments(self, names: Sequence[str], row_filter: RowFilter | None = None) -> tuple[RowGroup, ...]:
        """The fragments that have live rows, always in the same order.

        Their ``rows`` are all their live rows.

        Args:
            names: the columns that will be read; the fragments' sizes are those of these columns.
            row_filter: fragments of files that have no such rows may be left out.
        """

    def statistics(self, fragment: RowGroup, names: Sequence[str]) -> Callable[[str], Statistics]:
        """What is known of the named columns of a fragment without reading it."""
        constants = dict(fragment.partition)
        rows = max(fragment.rows, fragment.whole_rows)

        def of(name: str) -> Statistics:
            if name not in constants:
                return Statistics(rows=rows)
            value = constants[name]
            return Statistics(rows=rows, nulls=rows if value is None else 0, low=value, high=value)

        return of

    def is_clean(self, fragment: RowGroup, column: Column, shape: tuple[int, ...]) -> bool:
        """Whether a column has no nulls and, on average, lists of this shape.

        True only if that is known without reading.
        """
        return False

    @property
    def footers_bytes(self) -> tuple[int, ...]:
        """Memory that the footer of each file takes while it is read."""
        return ()

    def require(self, names: Sequence[str]) -> None:
        """Check that the named columns exist and can be read.

        Raises:
            DataError: they do not, or cannot.
        """
        missing = [name for name in names if name not in self.arrow_schema.names]
        if missing:
            raise DataError(missing_columns_text(missing, self.arrow_schema.names))
