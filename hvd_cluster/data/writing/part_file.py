"""One file of a data set while it is written, in Parquet or Arrow's format.

Rows go in, and row groups of one size come out. Both formats hold the same Arrow data in the same row groups, so that a
reader makes the same batches of them.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from hvd_cluster.data.columns import vectors
from hvd_cluster.data.columns.arrays import to_numpy
from hvd_cluster.data.files.filesystems import UnfinishedFile
from hvd_cluster.data.optional import load_pyarrow, since_pyarrow
from hvd_cluster.data.row_group import RowGroup
from hvd_cluster.data.schema import Column, ColumnKind, Schema
from hvd_cluster.data.store import Store
from hvd_cluster.data.tables.parquet import ARROW_SUFFIX

if TYPE_CHECKING:
    import pyarrow as pa


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
    #: Whether the writers make the folders; False where the driver has made them, and removes them when the files are
    #: no longer wanted: a writer that does not know it must not make them again.
    makes_folders: bool = True
    #: The file in each folder that is the driver's claim, see :class:`hvd_cluster.data.writing.folders.DatasetFolders`:
    #: without it, or beside SUCCESS, no more files may appear. "" where no other attempt writes.
    claim: str = ""

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders that will be written."""
        return (self.train_folder,) if self.validation is None else (self.train_folder, self.validation_folder)


class PartFile:
    """A file that appears under its name when it is complete."""

    def __init__(self, plan: PartPlan, path: str) -> None:
        self._plan = plan
        self._path = path
        self._schema: Any = None
        self._file: UnfinishedFile | None = None
        self._groups: list[RowGroup] = []
        self._waiting: list[Any] = []
        self._waiting_rows = 0
        self._group_rows = plan.group_rows

    def add(self, batch: pa.RecordBatch) -> None:
        """Take rows, and write the row groups that they fill."""
        pyarrow = load_pyarrow()
        if self._file is None:
            self._file = self._open(batch)
        arrays = [
            _stored(batch.column(column.name), column, kept)
            for column, kept in zip(self._plan.schema, self._schema.types, strict=True)
        ]
        self._waiting.append(pyarrow.RecordBatch.from_arrays(arrays, schema=self._schema))
        self._waiting_rows += batch.num_rows
        if self._waiting_rows >= self._group_rows:
            self._flush(self._file, self._waiting_rows - self._waiting_rows % self._group_rows)

    def close(self) -> list[RowGroup]:
        """Write what waits, and give the file its name.

        Returns:
            Its row groups; none where no rows came.
        """
        if self._file is None:
            return []
        self._flush(self._file, self._waiting_rows)
        self._file.complete()
        self._file = None
        return self._groups

    @property
    def kept_types(self) -> Any:
        """``pyarrow.Schema`` of the columns that keep their types.

        None where no rows came.
        """
        ragged = self._plan.allow_ragged
        kept = [column.name for column in self._plan.schema if _keeps_type(column, ragged)]
        return None if self._schema is None else load_pyarrow().schema([self._schema.field(name) for name in kept])

    def withdraw(self) -> None:
        """Remove the file, whether it is complete or not."""
        if self._file is not None:
            self._file.abandon()
            self._file = None
        elif self._groups:
            with contextlib.suppress(OSError):  # the error that led here is the one to report
                self._plan.store.delete(self._path)

    def _open(self, batch: pa.RecordBatch) -> UnfinishedFile:
        pyarrow = load_pyarrow()
        fields = [
            pyarrow.field(column.name, _stored_type(batch.column(column.name), column, self._plan.allow_ragged))
            for column in self._plan.schema
        ]
        self._schema = pyarrow.schema(fields)
        row_bytes = max(1, batch.nbytes // batch.num_rows)
        self._group_rows = max(1, min(self._group_rows, MAX_GROUP_BYTES // row_bytes))
        if self._plan.makes_folders:
            self._plan.store.fs.create_dir(self._path.rsplit("/", 1)[0], recursive=True)
        store = self._plan.store
        return UnfinishedFile(store.fs, self._path, self._writer_of, atomic_upload=store.uploads_whole)

    def _writer_of(self, stream: Any) -> Any:
        if self._plan.format == "arrow":
            return load_pyarrow("pyarrow.ipc").new_file(stream, self._schema)
        # Dictionaries pay for strings; numbers to train on are mostly distinct, and decode faster plain.
        texts = [column.name for column in self._plan.schema if not column.has_tensor]
        parquet = load_pyarrow("pyarrow.parquet")
        return parquet.ParquetWriter(
            stream, self._schema, use_dictionary=texts, **since_pyarrow(15, write_page_checksum=True)
        )

    def _flush(self, file: UnfinishedFile, rows: int) -> None:
        """Write the first ``rows`` waiting rows as row groups."""
        if not rows:
            return
        table = load_pyarrow().Table.from_batches(self._waiting)
        for begin in range(0, rows, self._group_rows):
            group = table.slice(begin, min(self._group_rows, rows - begin)).combine_chunks()
            with file.writing():
                if self._plan.format == "arrow":
                    file.writer.write_batch(group.to_batches()[0])
                else:
                    file.writer.write_table(group)
            self._groups.append(RowGroup(self._path, len(self._groups), len(group), size_bytes=group.nbytes))
        rest = table.slice(rows)
        self._waiting = rest.to_batches() if rest.num_rows else []
        self._waiting_rows -= rows


def _keeps_type(column: Column, allow_ragged: bool) -> bool:
    """Whether a column is written in the type in which it comes."""
    return not column.has_tensor or column.kind is ColumnKind.TIME or (column.kind is ColumnKind.LIST and allow_ragged)


def _stored_type(array: pa.Array, column: Column, allow_ragged: bool) -> Any:
    """The Arrow type that a column is written in.

    Lists and dense vectors become flat fixed-size lists. A column that begins with sparse vectors keeps Spark's struct:
    dense it could be a thousand times larger.
    """
    pyarrow = load_pyarrow()
    types = load_pyarrow("pyarrow.types")
    if types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if _keeps_type(column, allow_ragged):
        return array.type
    if column.kind is ColumnKind.VECTOR and types.is_struct(array.type) and vectors.is_sparse(array).any():
        return vectors.vector_type()
    element = pyarrow.from_numpy_dtype(np.dtype(column.dtype))
    if column.kind in {ColumnKind.NUMERIC, ColumnKind.BOOL}:
        return element
    return pyarrow.list_(element, int(to_numpy(array.slice(0, 1), column).size))


def _stored(array: pa.Array, column: Column, arrow_type: Any) -> pa.Array:
    """The array in the type that it is written in."""
    pyarrow = load_pyarrow()
    types = load_pyarrow("pyarrow.types")
    if types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if not column.has_tensor:
        return array
    if types.is_struct(arrow_type):
        # Another file than the one that the column began with may hold its vectors as lists.
        return array if types.is_struct(array.type) else vectors.from_matrix(to_numpy(array, column))
    if types.is_fixed_size_list(arrow_type):
        flat = pyarrow.array(np.ascontiguousarray(to_numpy(array, column)).reshape(-1))
        return pyarrow.FixedSizeListArray.from_arrays(flat, type=arrow_type)
    if column.kind in {ColumnKind.NUMERIC, ColumnKind.BOOL}:
        return pyarrow.array(to_numpy(array, column))
    return array
