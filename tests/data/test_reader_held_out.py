"""Resuming over many small files of which some rows were held out: each row that is left comes once."""

from __future__ import annotations

import itertools
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hvd_cluster.data.dataset import Dataset
from hvd_cluster.data.materializing import materialize
from hvd_cluster.data.reader import ParquetReader
from hvd_cluster.data.store import Store

NUM_FILES, ROWS = 30, 5


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("files")
    for number in range(NUM_FILES):
        table = pa.table({"id": range(number * ROWS, (number + 1) * ROWS)})
        pq.write_table(table, folder / f"{number:02d}.parquet")
    return materialize(folder, Store.create(tmp_path_factory.mktemp("work")), columns=["id"], validation=0.05)


@pytest.mark.long
@pytest.mark.parametrize("window_rows", [(1, 100), (100, 1), (100, 130)])
def test_each_row_comes_once_whatever_the_second_reader_is(dataset: Dataset, window_rows: tuple[int, int]) -> None:
    for seed in range(20):
        first, second, other = (
            ParquetReader(
                dataset, batch_size=5, seed=seed, remainder="partial", window_bytes=8 * rows, transformation_fn=function
            )
            for rows, function in ((window_rows[0], None), (window_rows[1], _same), (window_rows[0], _same))
        )
        begun = [batch["id"].tolist() for batch in itertools.islice(first, 10 + seed % 8)]
        second.load_state_dict(first.state_dict())
        rows = [row for batch in (*begun, *(batch["id"].tolist() for batch in second)) for row in batch]
        assert len(rows) == len(set(rows)) == dataset.train.rows
        # A transformation that changes nothing changes no order either.
        assert [batch["id"].tolist() for batch in itertools.islice(other, len(begun))] == begun


def _same(row: dict[str, Any]) -> dict[str, Any]:
    return row
