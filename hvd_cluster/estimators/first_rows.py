"""A few rows of a fit's data, to try the model on before all of them are written."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

from hvd_cluster.data.columns.pandas_table import to_table
from hvd_cluster.data.dataset import Dataset
from hvd_cluster.data.files.scratch import scratch_folder
from hvd_cluster.data.local_arrow import write_arrow
from hvd_cluster.data.reading.parquet import ParquetFolder, files_of
from hvd_cluster.data.store import Store
from hvd_cluster.errors import DataError
from hvd_cluster.estimators.frames import Frame

_ROWS = 32
#: This process writes less of its own memory in a moment; trying the model first would take longer.
_MIN_BYTES = 16 << 20


@contextlib.contextmanager
def first_rows(kind: Frame, data: Any, columns: Sequence[str], *, allow_ragged: bool) -> Iterator[Dataset | None]:
    """A data set of the first rows of ``data``.

    None where all rows are written in a moment, and where the first ones cannot be trained on: the check of all rows
    reports that with true counts.
    """
    with scratch_folder("trial") as folder:
        try:
            batches = _batches(kind, data, list(columns))
            found = None
            if batches is not None:
                found = write_arrow(
                    batches, folder, columns=columns, allow_ragged=allow_ragged, tensors_only=not allow_ragged
                )
        except DataError:
            found = None
        yield found


def _batches(kind: Frame, data: Any, columns: list[str]) -> Any:
    """The first rows as Arrow batches, or None."""
    if kind is Frame.SPARK:
        from hvd_cluster.data.spark_jobs import quoted
        from hvd_cluster.estimators.spark.direct_rows import first_batches

        return first_batches(data.select(*map(quoted, columns)))
    if kind is Frame.RAY:
        from hvd_cluster.estimators.ray.data import first_table

        return first_table(data.select_columns(columns), _ROWS).to_batches()
    if kind is Frame.PARQUET:
        store = Store.create(os.fspath(data))
        files = files_of(store.fs, [store.get_localized_path(store.prefix)])
        # Only the first file is opened: reading the footers of all of them may take as long as the trial.
        folder = ParquetFolder(store.fs, files[:1], columns)
        return folder.read(folder.row_groups[0], columns).slice(0, _ROWS).to_batches() if folder.rows else None
    table = to_table(data.head(_ROWS), columns) if kind is Frame.PANDAS else data.slice(0, _ROWS).select(columns)
    if not len(table) or table.nbytes / len(table) * len(data) < _MIN_BYTES:
        return None
    return table.combine_chunks().to_batches()
