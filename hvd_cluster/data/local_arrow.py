"""Rows that arrive as Arrow batches -> a data set in local Arrow files.

They are on this machine's disk, and readers map them into memory. For fits without a store: what delivers the batches
(a barrier stage, a Ray Dataset) hands each worker its rows, and the worker reads them as often as it has epochs.
"""

from __future__ import annotations

import itertools
import os
import uuid
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from hvd_cluster.data.dataset import Dataset, Split
from hvd_cluster.data.files.filesystems import unwritable_text
from hvd_cluster.data.schema import infer
from hvd_cluster.data.store import Store
from hvd_cluster.data.writing import column_stats
from hvd_cluster.data.writing import validation as validation_rule
from hvd_cluster.data.writing.assembly import NO_ROWS_TEXT
from hvd_cluster.data.writing.part_file import MAX_GROUP_ROWS, PartPlan
from hvd_cluster.data.writing.part_writer import write_part
from hvd_cluster.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa


def write_arrow(
    batches: Iterable[pa.RecordBatch],
    folder: str | os.PathLike[str],
    *,
    columns: Sequence[str] | None = None,
    validation: float | str | None = None,
    part: int = 0,
    seed: int = 0,
    group_rows: int = MAX_GROUP_ROWS,
    lanes: int = 1,
    allow_ragged: bool = False,
    float32: bool = False,
    tensors_only: bool = False,
    raw: Collection[str] = (),
    first_rows: int | None = None,
) -> Dataset:
    """Write batches to the local disk as they come.

    A few of them are in memory at a time. A reader makes the same batches of it, byte for byte, as of the Parquet that
    ``materialize`` writes of the same rows with the same split and row groups.

    Args:
        batches: the rows, at least one; all of one Arrow schema.
        folder: an existing or new local folder; the files go into a new folder in it, which ``Dataset.remove`` deletes.
        columns: the columns that are needed; None for all but the validation column.
        validation: share of the rows, in [0, 1), or the name of a column that marks rows; as in ``materialize``.
        part: number of this share of the data among those of all workers: the draw by ratio differs with it.
        seed: of that draw.
        group_rows: rows of a row group at most.
        lanes: streams that the order is interleaved from; 1 where each worker reads a data set of its own.
        allow_ragged: lists in a column may differ in length.
        float32: write float64 as float32.
        tensors_only: refuse columns of text and bytes too.
        raw: columns of any type that are written as they are, as in ``materialize``.
        first_rows: the batches are the first rows of larger data, that many at most; for messages.

    Returns:
        The data set; ``validation`` is None only where none was asked for, and may be empty.

    Raises:
        DataError: there are no rows, a column is missing, holds nulls or lists of unequal length, or the disk is full.
            Nothing is left behind then.
    """
    validation = validation_rule.check(validation, columns or ())
    root = Store.create(folder)
    if not root.is_local:
        raise DataError(f"{folder!r} is not on this machine's disk: memory-mapped files need a local folder")
    store = Store.create(f"{root.prefix}/hvd-{uuid.uuid4().hex}")
    rows = iter(batches)
    first = next((batch for batch in rows if batch.num_rows), None)
    if first is None:
        raise DataError(NO_ROWS_TEXT)
    if columns is None:
        columns = [name for name in first.schema.names if name != validation]
    wrong: list[str] = []
    schema = infer(first.schema, columns, wrong=wrong, raw=raw)
    if tensors_only and (text := schema.no_tensors_text(raw)):
        wrong.append(text)
    if float32:
        schema = schema.as_float32()
    plan = PartPlan(
        store=store,
        schema=schema,
        train_folder=store.get_train_data_path(),
        validation_folder=store.get_val_data_path(),
        validation=validation,
        seed=seed,
        group_rows=group_rows,
        allow_ragged=allow_ragged,
        wrong=tuple(wrong),
        format="arrow",
    )
    try:
        report = write_part(plan, part, itertools.chain([first], rows))
        seen = None if first_rows is None or report.rows < first_rows else first_rows  # all rows, if they are fewer
        column_stats.raise_if_any([*wrong, *report.stats.problems(allow_ragged=allow_ragged, first_rows=seen)])
    except OSError as error:
        store.delete(store.prefix)
        raise DataError(unwritable_text(store.prefix, error)) from error
    except BaseException:  # raised again: half a data set must not stay
        store.delete(store.prefix)
        raise
    held_out = None if validation is None else Split.of(report.validation, lanes)
    return Dataset(store, report.stats.with_lengths(schema), Split.of(report.train, lanes), held_out, (store.prefix,))
