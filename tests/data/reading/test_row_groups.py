"""Pieces of row groups come in the order that they were asked for in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import pytest

from hvd_cluster.data.cache import MemoryCache
from hvd_cluster.data.reading.row_groups import RowGroupTables
from hvd_cluster.data.reading.shards import RowRange
from hvd_cluster.data.reading.table_columns import held_out
from hvd_cluster.data.row_group import RowGroup
from hvd_cluster.data.tables.parquet import ParquetFragments


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize(
    "pieces",
    [
        [(0, 0, 3), (0, 3, 5), (1, 0, 4)],
        [(0, 3, 5), (0, 0, 3)],
        [(0, 0, 3), (0, 0, 2)],
        [(1, 0, 4), (0, 0, 5)],
        [(0, 3, 5), (1, 0, 4), (0, 0, 3)],
        [(1, 1, 2)],
    ],
    ids=str,
)
def test_pieces_of_a_file_come_in_the_order_given(tmp_path: Path, pieces: list[Any], cached: bool) -> None:
    path, groups = f"{tmp_path}/a.parquet", [list(range(5)), list(range(5, 9))]
    with pq.ParquetWriter(path, pa.schema([("x", pa.int64())])) as writer:
        for group in groups:
            writer.write_table(pa.table({"x": group}))
    tables = RowGroupTables(
        ParquetFragments(pa.fs.LocalFileSystem()), ["x"], cache=MemoryCache(1 << 20) if cached else None
    )
    ranges = [
        RowRange(RowGroup(path, index, stop - start, start, 8, whole_rows=len(groups[index])), 0, stop - start)
        for index, start, stop in pieces
    ]
    expected = [row for index, start, stop in pieces for row in groups[index][start:stop]]
    assert tables.read(ranges)["x"].to_pylist() == expected


def test_a_row_group_that_validation_takes_nothing_from_stays_whole() -> None:
    train, validation = held_out([RowGroup("a", index, 5, size_bytes=40) for index in range(40)], 0.05, seed=3)
    assert sum(group.rows for group in validation) == 10
    cut = {group.index for group in validation}
    assert [group.rows for group in train if group.index not in cut] == [5] * (40 - len(cut))
