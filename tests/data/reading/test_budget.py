"""How windows are cut into what a thread reads at one go."""

from __future__ import annotations

import pytest

from hvd_cluster.data.dataset import Split
from hvd_cluster.data.reading.block_buffer import chunks_of
from hvd_cluster.data.reading.budget import PREFETCH_BYTES, WINDOW_BYTES, Budget
from hvd_cluster.data.reading.footers import estimated
from hvd_cluster.data.reading.shards import plan
from hvd_cluster.data.reading.table_columns import held_out
from hvd_cluster.data.row_group import RowGroup

ROWS = 1000


def num_chunks(sizes: list[int], window_bytes: int | None) -> list[int]:
    """Chunks of each window of row groups of ROWS rows that take so many bytes."""
    groups = tuple(RowGroup("a.parquet", index, ROWS, size_bytes=size) for index, size in enumerate(sizes))
    split = Split(groups, ROWS * len(groups))
    budget = Budget.of(split, 8, window_bytes, 2, PREFETCH_BYTES)
    shards = plan(split, batch_size=10, rank=0, size=1, seed=0, epoch=0, window_rows=budget.window_rows)
    return [len(chunks_of(block, budget.chunk_bytes, budget.row_bytes)) for block in shards.blocks]


@pytest.mark.parametrize("window_bytes", [None, WINDOW_BYTES // 4])
def test_a_window_is_read_at_one_go_although_some_row_groups_are_larger_than_others(window_bytes: int | None) -> None:
    average = (window_bytes or WINDOW_BYTES) // 4
    sizes = [average + difference for difference in (-average // 20, average // 20) for _ in range(20)]
    assert num_chunks(sizes, window_bytes) == [1] * 10


def test_a_window_that_is_much_larger_than_the_usual_one_is_cut() -> None:
    assert num_chunks([WINDOW_BYTES // 4] * 40, 4 * WINDOW_BYTES) == [4, 4, 2]


def test_a_footer_counts_row_groups_and_not_the_pieces_that_held_out_rows_leave() -> None:
    whole = [RowGroup("file", index, 60) for index in range(20)]
    train, _ = held_out(whole, 0.3, seed=0)
    assert len(train) > len(whole)
    assert estimated(train, 5) == estimated(whole, 5)
