"""One partition of the data -> a file for training and one for validation.

It runs in the process that holds the partition. Runs on Spark's executors as well as in the driver; knows neither.
"""

from __future__ import annotations

import base64
import socket
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hvd_cluster.data.files.retry import file_info
from hvd_cluster.data.optional import load_pyarrow
from hvd_cluster.data.reading.parquet_files import SUCCESS
from hvd_cluster.data.row_group import RowGroup
from hvd_cluster.data.writing import validation
from hvd_cluster.data.writing.column_stats import TableStats
from hvd_cluster.data.writing.part_file import MAX_GROUP_BYTES, MAX_GROUP_ROWS, SUFFIXES, PartFile, PartPlan
from hvd_cluster.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["MAX_GROUP_BYTES", "MAX_GROUP_ROWS", "OnPart", "PartPlan", "PartReport", "RemoteParts", "write_part"]

#: Writes one part, given its number and its batches; what it came to, as plain data. It can be pickled.
OnPart = Callable[[int, Iterator[Any]], dict[str, Any]]


@dataclass(frozen=True)
class RemoteParts:
    """Data in parts on other machines, where functions can be run over each."""

    #: ``pyarrow.Schema`` of the parts; types of single parts may differ from it.
    schema: Any
    #: Runs a function over every part, where that lies; its answers, in any order.
    each: Callable[[OnPart], list[dict[str, Any]]]


@dataclass
class PartReport:
    """The result of writing a partition; travels as JSON."""

    #: Number of the partition.
    part: int = 0
    #: Rows seen, also where nothing was written.
    rows: int = 0
    #: Nulls and lengths.
    stats: TableStats = field(default_factory=TableStats)
    #: What was written.
    train: list[RowGroup] = field(default_factory=list)
    validation: list[RowGroup] = field(default_factory=list)
    #: ``pyarrow.Schema`` of the columns that were written in the types in which they came; None where nothing was.
    kept_types: Any = None

    def to_json(self) -> dict[str, Any]:
        """Plain values for :meth:`from_json`."""
        groups = {
            name: [[group.path, group.index, group.rows, group.size_bytes] for group in getattr(self, name)]
            for name in ("train", "validation")
        }
        kept = "" if self.kept_types is None else base64.b64encode(self.kept_types.serialize()).decode()
        return {"part": self.part, "rows": self.rows, "stats": self.stats.to_json(), "kept_types": kept, **groups}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> PartReport:
        """The report that :meth:`to_json` wrote."""
        train, held_out = (
            [RowGroup(path, index, rows, size_bytes=size) for path, index, rows, size in values[name]]
            for name in ("train", "validation")
        )
        stats, kept = TableStats.from_json(values["stats"]), base64.b64decode(values["kept_types"])
        kept_types = load_pyarrow("pyarrow.ipc").read_schema(load_pyarrow().py_buffer(kept)) if kept else None
        return cls(values["part"], values["rows"], stats, train, held_out, kept_types)


def write_part(plan: PartPlan, part: int, batches: Iterable[pa.RecordBatch]) -> PartReport:
    """Write a partition.

    Once a null or a ragged list turns up nothing more is written, but all rows are still counted, so that the caller
    can name every problem with its full count.

    Raises:
        OSError: the store cannot be written.
        DataError: an integer does not fit, a sparse vector is broken, or the driver has the part from another attempt.
    """
    report = PartReport(part=part)
    # A retried or speculative task never meets another one.
    name = f"part-{part:05d}-{uuid.uuid4().hex}{SUFFIXES[plan.format]}"
    train = PartFile(plan, f"{plan.train_folder}/{name}")
    held_out = PartFile(plan, f"{plan.validation_folder}/{name}")
    written = False
    try:
        for batch in batches:
            if not batch.num_rows:
                continue
            mask = _validation_mask(plan, part, report, batch)
            report.rows += batch.num_rows
            if plan.wrong or report.stats.problems(allow_ragged=plan.allow_ragged):
                continue
            if mask is None or not mask.any():
                train.add(batch)
            elif mask.all():
                held_out.add(batch)
            else:
                pyarrow = load_pyarrow()
                train.add(batch.filter(pyarrow.array(~mask)))
                held_out.add(batch.filter(pyarrow.array(mask)))
        if not plan.wrong and not report.stats.problems(allow_ragged=plan.allow_ragged):
            report.train, report.validation = train.close(), held_out.close()
            report.kept_types = train.kept_types if report.train else held_out.kept_types
            _require_claim(plan)
            written = True
    finally:
        if not written:
            train.withdraw()
            held_out.withdraw()
    return report


def _require_claim(plan: PartPlan) -> None:
    """Check that the driver still collects parts.

    This part's files have their names by now.
    """
    if not plan.claim:
        return
    missing = load_pyarrow("pyarrow.fs").FileType.NotFound
    paths = [f"{plan.train_folder}/{SUCCESS}", *(f"{folder}/{plan.claim}" for folder in plan.folders)]
    success, *claims = (info.type for info in file_info(plan.store.fs, paths))
    if success != missing:
        raise DataError(f"the rows in {plan.train_folder!r} are complete: this attempt is too late")
    if missing in claims:
        path = paths[1 + claims.index(missing)]
        raise DataError(
            f"{path}, which the driver has written, is not on {socket.gethostname()}: either the driver has given "
            f"the rows up, or the store {plan.store.prefix!r} must be a path or URL that all machines share"
        )


def _validation_mask(
    plan: PartPlan, part: int, report: PartReport, batch: pa.RecordBatch
) -> npt.NDArray[np.bool_] | None:
    """Count the batch, and mark its rows for validation, shape (n,).

    None where there is no validation.
    """
    report.stats.add(batch, plan.schema)
    if plan.validation is None:
        return None
    if not isinstance(plan.validation, str):
        start = report.rows
        return validation.ratio_mask(start, start + batch.num_rows, plan.validation, plan.seed, part)
    return validation.column_mask(batch.column(plan.validation), plan.validation, report.stats)
