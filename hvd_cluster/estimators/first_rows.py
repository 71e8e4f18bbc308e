"""A few rows of what a fit is given, to try the model on before all of them are written."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from hvd_cluster.data.columns.pandas_table import to_table
from hvd_cluster.data.dataset import Dataset
from hvd_cluster.data.files.scratch import scratch_folder
from hvd_cluster.data.local_arrow import write_arrow
from hvd_cluster.errors import DataError
from hvd_cluster.estimators.frames import Frame

_ROWS = 32
#: Fewer rows of this process's own memory are written in a moment.
_FEW_ROWS = 100_000


@contextlib.contextmanager
def first_rows(kind: Frame, data: Any, columns: Sequence[str], *, allow_ragged: bool) -> Iterator[Dataset | None]:
    """A data set of the first rows of ``data``.

    None where writing all rows takes no time or writes nothing, and where these rows cannot be trained on: the check
    of all rows reports that with true counts.
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
    if kind is Frame.SPARK:
        from hvd_cluster.data.spark_batches import quoted
        from hvd_cluster.estimators.spark.feed import first_batches

        return first_batches(data.select(*map(quoted, columns)))
    if kind not in (Frame.PANDAS, Frame.ARROW) or len(data) < _FEW_ROWS:
        return None
    table = to_table(data.head(_ROWS), columns) if kind is Frame.PANDAS else data.slice(0, _ROWS).select(columns)
    return table.combine_chunks().to_batches()
