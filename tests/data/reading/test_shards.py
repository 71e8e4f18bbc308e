"""The rules of the order, for random cuts into row groups, ranks, batch sizes, seeds and epochs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_cluster.data.dataset import Split
from hvd_cluster.data.reading.shards import Block, ShardPlan, num_steps, permutation, plan
from hvd_cluster.data.row_group import RowGroup

REMAINDERS = ("drop", "pad", "partial", "uneven")


def split_of(rows: list[int], lanes: int = 1) -> Split:
    """Row groups of these sizes; the row numbers over all are the values of their rows."""
    return Split(tuple(RowGroup(f"file{i // 3}", i, n) for i, n in enumerate(rows)), sum(rows), lanes)


def taken(split: Split, shard: ShardPlan) -> list[list[int]]:
    """The rows that a rank takes in each step, by their number in the split."""
    begins = dict(zip(split.row_groups, np.cumsum([0, *(g.rows for g in split.row_groups)]).tolist(), strict=False))

    def rows(block: Block) -> list[int]:
        window = np.concatenate([np.arange(r.start, r.stop) + begins[r.row_group] for r in block.ranges])
        return window[block.order()].tolist()

    slots: list[list[int]] = [[] for _ in range(shard.num_slots)]
    for block in shard.blocks:
        # A rank's row number m is in slot m % num_slots.
        assert block.first == block.slot + len(slots[block.slot]) * shard.num_slots
        slots[block.slot] += rows(block)
    order = [slots[m % shard.num_slots][m // shard.num_slots] for m in range(shard.rows)]
    steps = [order[t * shard.batch_size : (t + 1) * shard.batch_size] for t in range(shard.steps)]
    assert sum(map(len, steps)) == shard.rows
    assert [len(step) for step in steps] == [shard.rows_in(t) for t in range(shard.steps)]
    return steps


cuts = st.lists(st.integers(1, 40), min_size=1, max_size=12)
orders: Any = {
    "rows": cuts,
    "lanes": st.integers(1, 7),
    "size": st.integers(1, 7),
    "batch_size": st.integers(1, 9),
    "seed": st.integers(-5, 2**63),
    "epoch": st.integers(0, 1000),
    "shuffle": st.booleans(),
    "window_rows": st.integers(1, 120),
}


@pytest.mark.long
@settings(max_examples=150, deadline=None)
@given(remainder=st.sampled_from(REMAINDERS), **orders)
def test_ranks_take_equal_steps_and_every_row_as_often_as_the_remainder_says(
    rows: list[int], lanes: int, size: int, batch_size: int, remainder: Any, **order: Any
) -> None:
    split = split_of(rows, lanes)
    plans = [plan(split, rank, size, batch_size, remainder=remainder, **order) for rank in range(size)]
    steps = num_steps(split.rows, batch_size, size, remainder)
    if remainder == "uneven":
        assert [shard.steps for shard in plans] == sorted((shard.steps for shard in plans), reverse=True)
        assert plans[0].steps == steps <= plans[-1].steps + 1
    else:
        assert {shard.steps for shard in plans} == {steps}
    seen = [row for shard in plans for step in taken(split, shard) for row in step]
    counts = np.bincount(seen, minlength=split.rows)
    assert len(counts) == split.rows
    if remainder == "drop":
        assert counts.max(initial=0) <= 1
        assert len(seen) == steps * batch_size * size == split.rows - plans[0].num_dropped
        assert plans[0].num_dropped < batch_size * size
    elif remainder in {"partial", "uneven"}:
        assert (counts == 1).all()
    else:
        assert (counts >= 1).all()
        assert len(seen) == steps * batch_size * size == split.rows + plans[0].num_repeated
        if split.rows >= batch_size * size:
            assert counts.max() <= 2


@pytest.mark.long
@settings(max_examples=100, deadline=None)
@given(remainder=st.sampled_from(REMAINDERS), **orders)
def test_ranks_together_see_in_each_step_what_one_process_with_the_global_batch_sees(
    rows: list[int], lanes: int, size: int, batch_size: int, remainder: Any, **order: Any
) -> None:
    split = split_of(rows, lanes)
    alone = taken(split, plan(split, 0, 1, batch_size * size, remainder=remainder, **order))
    ranks = [taken(split, plan(split, r, size, batch_size, remainder=remainder, **order)) for r in range(size)]
    together = [sorted(row for rank in ranks for step in rank[t : t + 1] for row in step) for t in range(len(alone))]
    assert together == [sorted(step) for step in alone]


@pytest.mark.long
@settings(max_examples=100, deadline=None)
@given(**orders)
def test_padding_is_at_the_end_of_a_batch_and_is_counted(
    rows: list[int], lanes: int, size: int, batch_size: int, **order: Any
) -> None:
    split = split_of(rows, lanes)
    fresh: list[int] = []
    for rank in range(size):
        shard = plan(split, rank, size, batch_size, remainder="pad", **order)
        for t, step in enumerate(taken(split, shard)):
            fresh += step[: shard.fresh_in(t)]
    assert sorted(fresh) == list(range(split.rows))


@pytest.mark.long
@settings(max_examples=50, deadline=None)
@given(**orders)
def test_a_small_split_has_one_order_however_it_was_cut_into_row_groups(
    rows: list[int], seed: int, **order: Any
) -> None:
    size, batch_size, epoch, shuffle = (order[name] for name in ("size", "batch_size", "epoch", "shuffle"))
    one, other = split_of(rows, order["lanes"]), split_of([sum(rows)], 1)
    arguments: Any = {"seed": seed, "epoch": epoch, "shuffle": shuffle, "window_rows": sum(rows)}
    assert taken(one, plan(one, 0, size, batch_size, **arguments)) == taken(
        other, plan(other, 0, size, batch_size, **arguments)
    )


@pytest.mark.parametrize(("lanes", "size"), [(4, 4), (4, 2), (4, 8), (2, 2), (6, 3)])
def test_a_rank_reads_its_share_of_the_row_groups_only(lanes: int, size: int) -> None:
    split = split_of([10] * 48, lanes)
    for rank in range(size):
        shard = plan(split, rank, size, 5, window_rows=30)
        read = {piece.row_group for block in shard.blocks for piece in block.ranges}
        assert len(read) == 48 // min(lanes, size)


def test_epochs_and_seeds_give_different_orders_and_the_same_one_twice() -> None:
    split = split_of([50] * 20, 2)

    def order(seed: int, epoch: int) -> list[list[int]]:
        return taken(split, plan(split, 0, 2, 10, seed=seed, epoch=epoch, window_rows=100))

    assert order(1, 2) == order(1, 2)
    assert len({str(order(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9


def test_without_shuffling_one_process_reads_the_data_in_its_order() -> None:
    split = split_of([7, 5, 9])
    steps = taken(split, plan(split, 0, 1, 4, shuffle=False, remainder="partial", window_rows=8))
    assert [row for step in steps for row in step] == list(range(21))


def test_shuffling_mixes_the_rows_of_a_window_and_the_row_groups_of_a_lane() -> None:
    split = split_of([100] * 100)
    first = taken(split, plan(split, 0, 1, 1000, window_rows=1000))[0]
    groups = {row // 100 for row in first}
    assert len(groups) == 10
    assert groups != set(range(10))
    assert first != sorted(first)


def test_one_row_group_serves_many_ranks() -> None:
    split = split_of([64], lanes=8)
    seen = [row for rank in range(8) for step in taken(split, plan(split, rank, 8, 4, window_rows=16)) for row in step]
    assert sorted(seen) == list(range(64))


def test_the_order_is_the_one_that_was_published() -> None:
    """A change of this order makes checkpoints in mid-epoch and recorded runs worthless."""
    assert permutation(8, (1, 2)).tolist() == [1, 5, 2, 3, 4, 6, 7, 0]
    split = split_of([5, 5, 5], 2)
    ranks = [taken(split, plan(split, rank, 2, 3, seed=7, epoch=1, window_rows=4)) for rank in (0, 1)]
    assert ranks == [[[13, 11, 12], [14, 10, 7]], [[9, 8, 3], [0, 2, 4]]]


@pytest.mark.parametrize(
    "wrong", [{"rank": 2}, {"rank": -1}, {"batch_size": 0}, {"remainder": "keep"}, {"window_rows": 0}]
)
def test_numbers_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    arguments: Any = {"rank": 0, "size": 2, "batch_size": 4, **wrong}
    with pytest.raises(ValueError, match="no plan for rank"):
        plan(split_of([10]), **arguments)


def test_planning_takes_no_memory_per_row() -> None:
    split = Split(tuple(RowGroup("f", i, 1 << 30) for i in range(64)), 64 << 30, 4)
    shard = plan(split, 1, 4, 1024, window_rows=1 << 18)
    assert shard.steps == (64 << 30) // 4096
    assert math.isclose(sum(block.rows for block in shard.blocks), 16 << 30)
