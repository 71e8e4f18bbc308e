"""The first rows of a fit's training data."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from hvd_cluster.data.dataset import Split
from hvd_cluster.data.materializing import materialize
from hvd_cluster.data.row_group import RowGroup
from hvd_cluster.estimators.logged_model.first_rows import first_rows


def test_rows_have_the_shapes_that_the_user_gave_them(tmp_path):
    matrices = np.arange(120.0).reshape(20, 2, 3)
    frame = pd.DataFrame({"m": list(matrices), "text": ["a", None] * 10, "y": range(20)})
    dataset = materialize(frame, str(tmp_path), columns=["m", "text", "y"], raw=["text"])
    rows = first_rows(dataset, ["m", "text"])
    assert rows.column_names == ["m", "text"]
    assert rows["m"].type == pa.list_(pa.list_(pa.float64(), 3), 2)
    assert np.array_equal(np.array(rows["m"].to_pylist()), matrices[: len(rows)])
    assert rows["text"].to_pylist() == ["a", None] * 10


def test_no_more_row_groups_are_read_than_hold_them(tmp_path):
    pq.write_table(pa.table({"x": np.arange(3000.0)}), tmp_path / "rows.parquet", row_group_size=300)
    dataset = materialize(str(tmp_path), str(tmp_path), columns=["x"])
    metadata = pq.read_metadata(tmp_path / "rows.parquet")
    begin = metadata.row_group(4).column(0).dictionary_page_offset
    with (tmp_path / "rows.parquet").open("r+b") as file:
        file.seek(begin)
        file.write(bytes(metadata.row_group(4).total_byte_size // 2))
    assert first_rows(dataset, ["x"])["x"].to_pylist() == list(range(1000))


def test_the_first_row_groups_hold_the_rows_or_the_bytes() -> None:
    groups = [RowGroup("a", index, rows, size_bytes=100) for index, rows in enumerate([5, 5, 20])]
    split = Split.of(groups, lanes=4)
    assert [split.first(rows, 10_000).rows for rows in (1, 5, 6, 11, 99)] == [5, 5, 10, 30, 30]
    assert [split.first(99, size).rows for size in (1, 100, 101, 400)] == [5, 5, 10, 30]
    assert (split.first(6, 10_000).row_groups, split.first(6, 10_000).lanes) == (tuple(groups[:2]), 1)
