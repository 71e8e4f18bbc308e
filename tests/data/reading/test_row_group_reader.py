"""Rows of ranges as tensors: what need not be copied is not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq

from hvd_cluster.data.cache import MemoryCache
from hvd_cluster.data.columns.column_config import ColumnConfig
from hvd_cluster.data.reading.row_group_reader import RowGroupReader
from hvd_cluster.data.reading.row_groups import RowGroupTables
from hvd_cluster.data.reading.shards import RowRange
from hvd_cluster.data.row_group import RowGroup
from hvd_cluster.data.schema import infer
from hvd_cluster.data.tables.parquet import ParquetFragments


def test_a_row_group_from_the_cache_is_not_a_copy_without_an_order_and_no_one_elses_memory_with_one(
    tmp_path: Path,
) -> None:
    lists = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(40, dtype="f4")), 4)
    table = pa.table({"x": np.arange(10), "image": lists})
    pq.write_table(table, tmp_path / "a.parquet")
    tables = RowGroupTables(ParquetFragments(pa.fs.LocalFileSystem()), table.column_names, cache=MemoryCache(1 << 20))
    reader = RowGroupReader(tables, infer(table.schema), ColumnConfig())
    ranges = [RowRange(RowGroup(f"{tmp_path}/a.parquet", 0, 10), 0, 10)]

    one, other = reader.columns(ranges), reader.columns(ranges)
    assert {name: values.data_ptr() for name, values in one.items()} == {
        name: values.data_ptr() for name, values in other.items()
    }

    order = np.array([3, 1])
    taken, again = reader.columns(ranges, order), reader.columns(ranges, order)
    assert taken["x"].tolist() == [3, 1]
    assert taken["image"][:, 0].tolist() == [12.0, 4.0]
    taken["x"].zero_()
    taken["image"].zero_()
    assert again["x"].tolist() == [3, 1]
    assert reader.columns(ranges)["image"][1].tolist() == [4.0, 5.0, 6.0, 7.0]
    assert one["x"].tolist() == list(range(10))
