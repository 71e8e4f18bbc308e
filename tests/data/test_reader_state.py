"""A reader stops anywhere and goes on, also on other ranks: each row once, in the same order, in equal steps."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_cluster.data.reader import ParquetReader
from hvd_cluster.data.reading.position import Position
from hvd_cluster.errors import DataError


def written(folder: Path, groups: list[int]) -> Path:
    """One file with row groups of these sizes; ``id`` counts the rows."""
    path = folder / f"{'-'.join(map(str, groups))}.parquet"
    if not path.exists():
        folder.mkdir(exist_ok=True)
        ids = np.arange(sum(groups))
        begins = np.cumsum([0, *groups])
        with pq.ParquetWriter(path, pa.schema([("id", pa.int64())])) as writer:
            for begin, stop in itertools.pairwise(begins):
                writer.write_table(pa.table({"id": ids[begin:stop]}))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


def ranks_of(path: Path, size: int, **options: Any) -> list[ParquetReader]:
    options = {"batch_size": 4, "window_bytes": 8 * 16, **options}
    return [ParquetReader(path, rank=rank, size=size, **options) for rank in range(size)]


def taken(readers: list[ParquetReader], steps: int | None = None) -> list[list[list[int]]]:
    """For each rank its batches, at most ``steps`` of them."""
    return [[batch["id"].tolist() for batch in itertools.islice(reader, steps)] for reader in readers]


def flat(ranks: list[list[list[int]]]) -> list[int]:
    return [row for batches in ranks for batch in batches for row in batch]


def weaved(ranks: list[list[list[int]]]) -> list[int]:
    """The rows in the order of the epoch: position i is on rank ``i % R``."""
    per_rank = [[row for batch in batches for row in batch] for batches in ranks]
    rows = [None] * sum(map(len, per_rank))
    for rank, one in enumerate(per_rank):
        rows[rank :: len(per_rank)] = one  # type: ignore[assignment]
    return rows  # type: ignore[return-value]


@settings(max_examples=40, deadline=None)
@given(
    groups=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4)),
    batch_sizes=st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(1, 6)),
    stops=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    epoch=st.integers(0, 3),
    seed=st.integers(0, 5),
    shuffle=st.booleans(),
    threads=st.integers(1, 3),
)
def test_an_epoch_that_is_interrupted_twice_on_other_ranks_gives_each_row_once_in_one_order(
    folder: Path,
    groups: list[int],
    sizes: tuple[int, int, int],
    batch_sizes: tuple[int, int, int],
    stops: tuple[int, int],
    epoch: int,
    seed: int,
    shuffle: bool,
    threads: int,
) -> None:
    path = written(folder, groups)
    options: Any = {"seed": seed, "shuffle": shuffle, "remainder": "partial"}
    whole = weaved(taken(ranks_of(path, 1, lanes=sizes[0], epoch=epoch, **options)))
    assert sorted(whole) == list(range(sum(groups)))

    seen: list[int] = []
    state: dict[str, Any] | None = None
    for size, batch_size, stop in zip(sizes, batch_sizes, (*stops, None), strict=True):
        readers = ranks_of(path, size, epoch=epoch, batch_size=batch_size, num_threads=threads, **options)
        for reader in readers:
            if state is not None:
                reader.load_state_dict(state)
        batches = taken(readers, stop)
        assert len({len(one) for one in batches}) == 1, "ranks take equal steps"
        seen += weaved(batches)
        states = [json.loads(json.dumps(reader.state_dict())) for reader in readers]
        assert all(one == states[0] for one in states), "the state is the same on all ranks"
        state = states[0]
        if state["epoch"] > epoch:  # it was over before the last interruption
            break
    assert seen == whole
    assert state is not None
    assert (state["epoch"], state["row"]) == (epoch + 1, 0)


@pytest.mark.parametrize("remainder", ["drop", "pad", "partial", "uneven"])
@pytest.mark.parametrize("stop", [1, 3])
def test_the_rest_of_an_epoch_on_as_many_ranks_is_what_it_would_have_been(
    folder: Path, remainder: Any, stop: int
) -> None:
    path = written(folder, [17, 40, 5, 21])
    whole = taken(ranks_of(path, 3, remainder=remainder))
    first = ranks_of(path, 3, remainder=remainder)
    begun = taken(first, stop)
    again = ranks_of(path, 3, remainder=remainder, num_threads=4, prefetch_bytes=100)
    for reader in again:
        reader.load_state_dict(first[0].state_dict())
    rest = taken(again)
    assert [begin + end for begin, end in zip(begun, rest, strict=True)] == whole
    # The reader that was interrupted goes on as well.
    assert taken(first) == rest


def test_each_iteration_is_an_epoch_and_the_next_one_follows(folder: Path) -> None:
    path = written(folder, [20, 20])
    (reader,) = ranks_of(path, 1, epoch=5)
    assert reader.position == Position(epoch=5)
    epochs = [taken([reader]) for _ in range(3)]
    assert reader.position == Position(epoch=8)
    assert [taken(ranks_of(path, 1, epoch=epoch)) for epoch in (5, 6, 7)] == epochs
    assert len({str(epoch) for epoch in epochs}) == 3
    reader.set_epoch(6)
    assert taken([reader]) == epochs[1]
    assert len(reader) == 10


def test_a_resumed_reader_goes_into_the_next_epoch_as_one_that_was_never_stopped(folder: Path) -> None:
    path = written(folder, [30, 30, 30])
    through = ranks_of(path, 2)
    expected = [taken(through), taken(through)]
    first = ranks_of(path, 3)
    taken(first, 2)
    again = ranks_of(path, 2)
    for reader in again:
        reader.load_state_dict(first[0].state_dict())
    taken(again)
    assert taken(again) == expected[1]


def test_after_the_last_batch_the_epoch_is_over_but_not_yet_the_next(folder: Path) -> None:
    """A loop that saved its state in the last step finds nothing more to do in this epoch."""
    path = written(folder, [20])
    (reader,) = ranks_of(path, 1)
    batches = iter(reader)
    for _ in range(5):
        next(batches)
    (again,) = ranks_of(path, 1)
    again.load_state_dict(reader.state_dict())
    assert taken([again]) == [[]]
    assert again.position == Position(epoch=1)


def test_uneven_ranks_take_every_row_and_no_empty_batch(folder: Path) -> None:
    path = written(folder, [10, 4])
    readers = ranks_of(path, 3, remainder="uneven")  # 14 rows: one step of 12, and two rows for three ranks
    batches = taken(readers)
    assert [len(one) for one in batches] == [2, 2, 1] == [reader.steps for reader in readers]
    assert sorted(flat(batches)) == list(range(14))
    assert all(reader.position == Position(epoch=1) for reader in readers)


def test_one_order_for_any_number_of_ranks_where_lanes_are_given(folder: Path) -> None:
    path = written(folder, [25, 25, 25, 25])
    orders = [weaved(taken(ranks_of(path, size, lanes=2, batch_size=1))) for size in (1, 2, 4)]
    assert orders[0] == orders[1] == orders[2]


@pytest.mark.parametrize(
    ("options", "message"),
    [({"seed": 1}, "seed was 0 and is 1"), ({"shuffle": False}, "shuffle was True and is False")],
    ids=["seed", "shuffle"],
)
def test_the_state_of_another_order_is_refused(folder: Path, options: dict[str, Any], message: str) -> None:
    path = written(folder, [20, 20])
    (one,), (other,) = ranks_of(path, 1), ranks_of(path, 1, **options)
    with pytest.raises(DataError, match=message):
        other.load_state_dict(one.state_dict())


def test_the_state_of_other_data_is_refused(folder: Path) -> None:
    (one,), (other,) = ranks_of(written(folder, [20, 20]), 1), ranks_of(written(folder, [19, 20]), 1)
    with pytest.raises(DataError, match="rows was 40 and is 39; row_groups_crc was"):
        other.load_state_dict(one.state_dict())
