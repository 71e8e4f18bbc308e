"""One partition of the data -> one Parquet file for training and one for validation, in whatever process holds it.

Runs on Spark's executors as well as in the driver; knows neither.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hvd_cluster.data import validation, vectors
from hvd_cluster.data.arrays import to_numpy
from hvd_cluster.data.census import Census
from hvd_cluster.data.dataset import RowGroup
from hvd_cluster.data.optional import load_pyarrow
from hvd_cluster.data.schema import Column, Kind, Schema
from hvd_cluster.data.store import Store

if TYPE_CHECKING:
    import pyarrow as pa

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

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders that will be written."""
        return (self.train_folder,) if self.validation is None else (self.train_folder, self.validation_folder)


@dataclass
class PartReport:
    """What a partition came to; travels as JSON."""

    #: Number of the partition.
    part: int = 0
    #: Rows seen, also where nothing was written.
    rows: int = 0
    #: Nulls and lengths.
    census: Census = field(default_factory=Census)
    #: What was written.
    train: list[RowGroup] = field(default_factory=list)
    validation: list[RowGroup] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Plain values for :meth:`from_json`."""
        groups = {
            name: [[group.path, group.index, group.rows, group.size_bytes] for group in getattr(self, name)]
            for name in ("train", "validation")
        }
        return {"part": self.part, "rows": self.rows, "census": self.census.to_json(), **groups}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> PartReport:
        """The report that :meth:`to_json` wrote."""
        train, held_out = (
            [RowGroup(path, index, rows, size_bytes=size) for path, index, rows, size in values[name]]
            for name in ("train", "validation")
        )
        return cls(values["part"], values["rows"], Census.from_json(values["census"]), train, held_out)


def write_part(plan: PartPlan, part: int, batches: Iterable[pa.RecordBatch]) -> PartReport:
    """Write a partition.

    Once a null or a ragged list turns up nothing more is written, but all rows are still counted, so that the caller
    can name every problem with its full count.

    Args:
        plan: what all partitions share.
        part: number of this one.
        batches: its rows; columns of ``plan.schema`` and the validation column.

    Raises:
        OSError: the store cannot be written.
        DataError: an integer does not fit, or a sparse vector is broken.
    """
    report = PartReport(part=part)
    name = f"part-{part:05d}-{uuid.uuid4().hex}.parquet"  # a retried or speculative task never meets another one
    train = _File(plan, f"{plan.train_folder}/{name}")
    held_out = _File(plan, f"{plan.validation_folder}/{name}")
    try:
        for batch in batches:
            if not batch.num_rows:
                continue
            mask = _validation_mask(plan, part, report, batch)
            report.rows += batch.num_rows
            if report.census.problems(allow_ragged=plan.allow_ragged):
                continue
            if mask is None or not mask.any():
                train.add(batch)
            elif mask.all():
                held_out.add(batch)
            else:
                pyarrow = load_pyarrow()
                train.add(batch.filter(pyarrow.array(~mask)))
                held_out.add(batch.filter(pyarrow.array(mask)))
        if not report.census.problems(allow_ragged=plan.allow_ragged):
            report.train, report.validation = train.close(), held_out.close()
    finally:
        train.abandon()
        held_out.abandon()
    return report


def _validation_mask(
    plan: PartPlan, part: int, report: PartReport, batch: pa.RecordBatch
) -> npt.NDArray[np.bool_] | None:
    """Count the batch, and mark its rows that are for validation, shape (n,); None where there is no validation."""
    report.census.add(batch, plan.schema)
    if plan.validation is None:
        return None
    if not isinstance(plan.validation, str):
        start = report.rows
        return validation.ratio_mask(start, start + batch.num_rows, plan.validation, plan.seed, part)
    return validation.column_mask(batch.column(plan.validation), plan.validation, report.census)


class _File:
    """A Parquet file that appears under its name when it is complete."""

    def __init__(self, plan: PartPlan, path: str) -> None:
        self._plan = plan
        self._path = path
        folder, name = path.rsplit("/", 1)
        self._temporary = f"{folder}/_{name}"  # readers pass over names that begin with "_"
        self._schema: Any = None
        self._writer: Any = None
        self._stream: Any = None
        self._footers: list[Any] = []
        self._waiting: list[Any] = []
        self._waiting_rows = 0
        self._group_rows = plan.group_rows

    def add(self, batch: pa.RecordBatch) -> None:
        """Take rows, and write the row groups that they fill."""
        pyarrow = load_pyarrow()
        if self._writer is None:
            self._open(batch)
        arrays = [
            _stored(batch.column(column.name), column, kept)
            for column, kept in zip(self._plan.schema, self._schema.types, strict=True)
        ]
        self._waiting.append(pyarrow.RecordBatch.from_arrays(arrays, schema=self._schema))
        self._waiting_rows += batch.num_rows
        if self._waiting_rows >= self._group_rows:
            self._flush(self._waiting_rows - self._waiting_rows % self._group_rows)

    def close(self) -> list[RowGroup]:
        """Write what waits, and give the file its name.

        Returns:
            Its row groups; none where no rows came.
        """
        if self._writer is None:
            return []
        self._flush(self._waiting_rows)
        self._writer.close()
        self._stream.close()
        self._writer = self._stream = None
        self._plan.store.fs.move(self._temporary, self._path)
        footer = self._footers[0]
        groups = [footer.row_group(index) for index in range(footer.num_row_groups)]
        return [
            RowGroup(self._path, index, group.num_rows, size_bytes=group.total_byte_size)
            for index, group in enumerate(groups)
        ]

    def abandon(self) -> None:
        """Remove a file that was not completed; after `close` it does nothing."""
        if self._writer is None:
            return
        try:
            self._writer.close()
            self._stream.close()
        except OSError:  # a full disk: what matters is that the file goes
            pass
        self._writer = None
        self._plan.store.delete(self._temporary)

    def _open(self, batch: pa.RecordBatch) -> None:
        parquet, pyarrow = load_pyarrow("pyarrow.parquet"), load_pyarrow()
        fields = [
            pyarrow.field(column.name, _stored_type(batch.column(column.name), column, self._plan.allow_ragged))
            for column in self._plan.schema
        ]
        self._schema = pyarrow.schema(fields)
        row_bytes = max(1, batch.nbytes // batch.num_rows)
        self._group_rows = max(1, min(self._group_rows, MAX_GROUP_BYTES // row_bytes))
        self._plan.store.fs.create_dir(self._path.rsplit("/", 1)[0], recursive=True)
        self._stream = self._plan.store.fs.open_output_stream(self._temporary)
        # Dictionaries pay for strings; numbers that are to be trained on are mostly distinct, and decode faster plain.
        texts = [column.name for column in self._plan.schema if not column.has_tensor]
        self._writer = parquet.ParquetWriter(
            self._stream, self._schema, use_dictionary=texts, metadata_collector=self._footers
        )

    def _flush(self, rows: int) -> None:
        """Write the first ``rows`` waiting rows as row groups."""
        if not rows:
            return
        table = load_pyarrow().Table.from_batches(self._waiting)
        self._writer.write_table(table.slice(0, rows), row_group_size=self._group_rows)
        rest = table.slice(rows)
        self._waiting = rest.to_batches() if rest.num_rows else []
        self._waiting_rows -= rows


def _stored_type(array: pa.Array, column: Column, allow_ragged: bool) -> Any:
    """The Arrow type that a column is written in; lists and dense vectors become flat fixed-size lists.

    A column that begins with sparse vectors keeps Spark's struct: dense it could be a thousand times larger.
    """
    pyarrow = load_pyarrow()
    types = load_pyarrow("pyarrow.types")
    if types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if not column.has_tensor or (column.kind is Kind.LIST and allow_ragged):
        return array.type
    if column.kind is Kind.VECTOR and types.is_struct(array.type) and vectors.is_sparse(array).any():
        return vectors.vector_type()
    element = pyarrow.from_numpy_dtype(np.dtype(column.dtype))
    if column.kind in {Kind.NUMERIC, Kind.BOOL}:
        return element
    return pyarrow.list_(element, int(to_numpy(array.slice(0, 1), column).size))


def _stored(array: pa.Array, column: Column, arrow_type: Any) -> pa.Array:
    """The array in the type that it is written in."""
    pyarrow = load_pyarrow()
    types = load_pyarrow("pyarrow.types")
    if types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if types.is_struct(arrow_type):
        return array
    if types.is_fixed_size_list(arrow_type):
        flat = pyarrow.array(np.ascontiguousarray(to_numpy(array, column)).reshape(-1))
        return pyarrow.FixedSizeListArray.from_arrays(flat, type=arrow_type)
    if column.kind in {Kind.NUMERIC, Kind.BOOL}:
        return pyarrow.array(to_numpy(array, column))
    return array
