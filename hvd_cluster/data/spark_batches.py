"""Arrow batches of a Spark DataFrame whose columns have any names; works the same on classic and Connect sessions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

#: What Spark calls for each partition.
OnBatches = Callable[[Iterator[Any]], Iterator[Any]]


def quoted(name: str) -> str:
    """A column's name as ``select`` takes it: dots and backticks are part of it."""
    return "`" + name.replace("`", "``") + "`"


def cast(frame: Any, types: Mapping[str, str]) -> Any:
    """``frame`` with columns of other types, by name."""
    columns = [frame[quoted(n)].cast(types[n]).alias(n) if n in types else frame[quoted(n)] for n in frame.columns]
    return frame.select(*columns) if types else frame


def map_batches(frame: Any, fn: OnBatches, schema: Any) -> Any:
    """``frame.mapInArrow(fn, schema)`` for any names.

    ``mapInArrow`` looks columns up by name, and takes a dot for a field and a backtick for a quote. So it gets columns
    named c0, c1, ... by their places, and ``fn`` gets batches with the names of ``frame``.
    """
    names = list(frame.columns)
    numbered = frame.toDF(*(f"c{index}" for index in range(len(names))))
    return numbered.mapInArrow(functools.partial(_with_names, fn, names), schema)


def _with_names(fn: OnBatches, names: Sequence[str], batches: Iterator[pa.RecordBatch]) -> Iterator[Any]:
    from pyarrow import RecordBatch

    # rename_columns() of a batch came with pyarrow 16, after the oldest that we take.
    return fn(RecordBatch.from_arrays(batch.columns, names=list(names)) for batch in batches)
