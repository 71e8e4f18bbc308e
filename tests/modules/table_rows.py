"""All rows of a table as its readers yield them over an epoch, for comparison with what is in the table."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

from hvd_cluster.data.reader import ParquetReader

#: What stands for a null in columns of numbers.
NULL = -(1 << 40)
#: Histories in the slow property tests.
NUM_HISTORIES = int(os.environ.get("HVD_TEST_HISTORIES", "1000"))


def rows_read(table: Any, columns: Sequence[str], *, size: int = 2, **options: Any) -> Counter[tuple[float, ...]]:
    """How often each row comes over all ranks of an epoch; nulls as NULL.

    Every rank takes the same number of steps.
    """
    found: Counter[tuple[float, ...]] = Counter()
    steps = set()
    fill = dict.fromkeys(columns, NULL)
    for rank in range(size):
        given = {"batch_size": 7, "remainder": "partial", "num_threads": 1, "fill_nulls": fill, **options}
        with ParquetReader(table, columns, rank=rank, size=size, **given) as reader:
            steps.add(len(reader))
            for batch in reader:
                found.update(zip(*(batch[name].tolist() for name in columns), strict=True))
    assert len(steps) == 1
    return found


def expected(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> Counter[tuple[float, ...]]:
    """The same for rows as dicts, in which None and missing columns are nulls."""
    return Counter(tuple(NULL if row.get(name) is None else row[name] for name in columns) for row in rows)
