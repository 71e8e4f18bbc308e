"""The first rows of a fit's training data, before any function of the user's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hvd_cluster.data.columns.arrow_values import nested
from hvd_cluster.data.dataset import Dataset
from hvd_cluster.data.preprocessing import Preprocess
from hvd_cluster.data.reader import ParquetReader
from hvd_cluster.data.schema import Column, Schema

if TYPE_CHECKING:
    import pyarrow as pa

#: Rows that are looked through for nulls, and their size in the files: the driver reads them.
MAX_ROWS, MAX_BYTES = 1000, 16 << 20


def first_rows(dataset: Dataset, columns: Sequence[str]) -> pa.Table:
    """Up to ``MAX_ROWS`` training rows, each column named once; fewer if large."""
    first = dataset.train.first(MAX_ROWS, MAX_BYTES)
    found: list[pa.Table] = []

    def keep(rows: pa.Table) -> npt.NDArray[Any]:
        found.append(rows)
        return np.zeros(len(rows))

    reader = ParquetReader(
        first,
        Schema(tuple(Column.raw(name) for name in columns)),
        dataset.store,
        batch_size=min(MAX_ROWS, first.rows),
        shuffle=False,
        remainder="pad",
        preprocess=Preprocess(fn=keep, columns=tuple(columns), batch_format="pyarrow"),
        num_threads=1,
    )
    next(reader.epoch(0))
    rows = found[0]
    for index, name in enumerate(columns):
        if name in dataset.schema:
            rows = rows.set_column(index, name, nested(rows.column(index), dataset.schema[name].shape))
    return rows
