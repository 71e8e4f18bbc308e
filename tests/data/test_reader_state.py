"""A reader stops anywhere and goes on, also on other ranks: each row once, in the same order, in equal steps."""

from __future__ import annotations

import gc
import itertools
import json
import math
import os
import pickle
import shutil
import threading
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


def interleaved(ranks: list[list[list[int]]]) -> list[int]:
    """The rows in the order of the epoch: position i is on rank ``i % R``."""
    per_rank = [[row for batch in batches for row in batch] for batches in ranks]
    rows = [None] * sum(map(len, per_rank))
    for rank, one in enumerate(per_rank):
        rows[rank :: len(per_rank)] = one  # type: ignore[assignment]
    return rows  # type: ignore[return-value]


@pytest.mark.long
@settings(max_examples=80, deadline=None)
@given(
    remainder=st.sampled_from(["drop", "pad", "partial", "uneven"]),
    groups=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4)),
    batch_sizes=st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(1, 6)),
    stops=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    epoch=st.integers(0, 3),
    seed=st.integers(0, 5),
    shuffle=st.booleans(),
    threads=st.integers(1, 3),
)
def test_an_epoch_that_is_interrupted_twice_on_other_ranks_gives_each_row_as_often_as_the_remainder_says(
    folder: Path,
    remainder: Any,
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
    options: Any = {"seed": seed, "shuffle": shuffle, "remainder": remainder}
    rows = sum(groups)
    in_order = {"seed": seed, "shuffle": shuffle, "remainder": "partial"}
    whole = interleaved(taken(ranks_of(path, 1, lanes=sizes[0], epoch=epoch, **in_order)))
    assert sorted(whole) == list(range(rows))

    seen: list[int] = []
    state: dict[str, Any] | None = None
    for size, batch_size, stop in zip(sizes, batch_sizes, (*stops, None), strict=True):
        readers = ranks_of(path, size, epoch=epoch, batch_size=batch_size, num_threads=threads, **options)
        for reader in readers:
            if state is not None:
                reader.load_state_dict(state)
        batches = taken(readers, stop)
        steps = {len(one) for one in batches}
        if remainder == "uneven":
            assert max(steps) - min(steps) <= 1
        else:
            assert len(steps) == 1, "ranks take equal steps"
        seen += interleaved(batches)
        states = [json.loads(json.dumps(reader.state_dict())) for reader in readers]
        if len(steps) == 1:
            assert all(one == states[0] for one in states), "the state is the same on all ranks"
        state = max(states, key=lambda one: (one["epoch"], one["row"]))
        if state["epoch"] > epoch:  # it was over before the last interruption
            break
    assert seen[:rows] == whole[: len(seen)], "none is lost or repeated before the remainder"
    global_batch = size * batch_size
    if remainder == "drop":
        assert rows - global_batch < len(seen) <= rows
    elif remainder == "pad":
        assert rows <= len(seen) < rows + max(map(math.prod, zip(sizes, batch_sizes, strict=True)))
        assert set(seen[rows:]) <= set(whole)
    else:
        assert len(seen) == rows
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


def readers_threads() -> int:
    return sum(thread.name.startswith("hvd-reader") for thread in threading.enumerate())


def test_reading_ahead_into_the_next_epoch_changes_no_order_and_ends_with_the_last_epoch(folder: Path) -> None:
    path = written(folder, [30] * 8)
    options: Any = {"window_bytes": 8 * 40, "prefetch_bytes": 8 * 60}
    plain, ahead = ranks_of(path, 1, **options)[0], ranks_of(path, 1, num_epochs=3, **options)[0]
    for epoch in range(4):
        assert taken([ahead]) == taken([plain])
        assert (readers_threads() > 0) == (epoch < 2), "it waits for the next epoch, while there is one"
        assert ahead.position == Position(epoch=epoch + 1)
    for epoch in range(3):
        begun = itertools.islice(ahead.epoch(epoch), plain.steps)  # which stops before the iterator has ended
        assert [batch["id"].tolist() for batch in begun] == [batch["id"].tolist() for batch in plain.epoch(epoch)]
        del begun
    assert readers_threads() == 0


@pytest.mark.long
def test_what_was_read_ahead_is_let_go_when_the_reader_goes_elsewhere_is_closed_or_dropped(folder: Path) -> None:
    path = written(folder, [30] * 8)
    (plain,) = ranks_of(path, 1)
    for end in ("elsewhere", "closed", "dropped", "left"):
        (reader,) = ranks_of(path, 1, num_epochs=100)
        taken([reader])
        assert readers_threads() > 0
        copy = pickle.loads(pickle.dumps(reader))
        if end == "elsewhere":
            reader.set_epoch(7)
            plain.set_epoch(7)
            assert taken([reader], 3) == taken([plain], 3)
        elif end == "closed":
            reader.close()
        elif end == "left":
            taken([reader], 1)
        del reader
        gc.collect()
        assert readers_threads() == 0
        plain.set_epoch(1)
        assert taken([copy], 2) == taken([plain], 2)


def test_an_error_in_what_is_read_ahead_comes_with_its_epoch(tmp_path: Path) -> None:
    path = written(tmp_path / "in", [30] * 8)
    (reader,) = ranks_of(path, 1, num_epochs=2, window_bytes=8 * 30, prefetch_bytes=1)
    batches = iter(reader)
    for _ in range(59):
        next(batches)
    path.write_bytes(b"")
    next(batches)
    with pytest.raises(StopIteration):
        next(batches)
    with pytest.raises(DataError, match=r"cannot read row group \d of .*parquet"):
        taken([reader])
    del batches


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


def test_a_state_of_the_last_step_is_the_beginning_of_the_next_epoch(folder: Path) -> None:
    path = written(folder, [22])
    (reader,) = ranks_of(path, 1)
    batches = iter(reader)
    for _ in range(5):
        next(batches)
    (again,), (fresh,) = ranks_of(path, 1), ranks_of(path, 1, epoch=1)
    again.load_state_dict(reader.state_dict())
    assert again.position == Position(epoch=1)
    assert taken([again]) == taken([fresh])


@pytest.mark.parametrize("remainder", ["drop", "pad", "partial", "uneven"])
@pytest.mark.parametrize("num_epochs", [None, 3])
def test_loops_that_count_steps_go_through_every_epoch(folder: Path, remainder: Any, num_epochs: int | None) -> None:
    """They do not ask for the end of an iteration: Lightning's fetcher, islice, zip with a range."""
    path = written(folder, [17, 20])
    counted, whole = ranks_of(path, 3, remainder=remainder), ranks_of(path, 3, remainder=remainder)
    for reader in counted:
        epochs = [list(itertools.islice(reader, len(reader))) for _ in range(3)]
        assert {len(epoch) for epoch in epochs} == {reader.steps}
        expected = [taken([whole[reader._rank]])[0] for _ in range(3)]
        assert [[batch["id"].tolist() for batch in epoch] for epoch in epochs] == expected
        assert len({str(epoch) for epoch in expected}) == 3


def test_uneven_ranks_take_every_row_and_no_empty_batch(folder: Path) -> None:
    path = written(folder, [10, 4])
    readers = ranks_of(path, 3, remainder="uneven")  # 14 rows: one step of 12, and two rows for three ranks
    batches = taken(readers)
    assert [len(one) for one in batches] == [2, 2, 1] == [reader.steps for reader in readers]
    assert sorted(flat(batches)) == list(range(14))
    assert all(reader.position == Position(epoch=1) for reader in readers)


def test_one_order_for_any_number_of_ranks_where_lanes_are_given(folder: Path) -> None:
    path = written(folder, [25, 25, 25, 25])
    orders = [interleaved(taken(ranks_of(path, size, lanes=2, batch_size=1))) for size in (1, 2, 4)]
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


def changed(folder: Path, how: str) -> Path:
    """A copy of a file, in which something has changed that no row count tells."""
    source = written(folder, [20, 20])
    copy = folder / how / source.name
    copy.parent.mkdir(exist_ok=True)
    shutil.copy2(source, copy)
    status = source.stat()
    if how == "values":
        pq.write_table(pa.table({"id": np.arange(100, 140)}), copy, row_group_size=20)
    elif how == "name":
        copy = copy.rename(copy.with_name("other.parquet"))
    if how == "time":
        os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    else:
        os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns))
    return copy


@pytest.mark.parametrize(
    ("how", "difference"), [("values", "files_crc"), ("name", "files_crc"), ("time", "times_crc"), ("place", "")]
)
def test_the_state_of_other_files_with_as_many_rows_is_refused(folder: Path, how: str, difference: str) -> None:
    (one,), (other,) = ranks_of(written(folder, [20, 20]), 1), ranks_of(changed(folder, how), 1)
    taken([one], 2)
    if difference:
        with pytest.raises(DataError, match=rf"{difference} was \d+ and is \d+\. .*load the state with strict=False"):
            other.load_state_dict(one.state_dict())
    other.load_state_dict(one.state_dict(), strict=not difference)
    assert other.position == one.position


def test_the_state_of_other_filters_is_refused(folder: Path) -> None:
    path = written(folder, [20, 20])
    (one,), (other,) = ranks_of(path, 1, filters=[("id", "<", 10)]), ranks_of(path, 1, filters=[("id", ">=", 30)])
    with pytest.raises(DataError, match="filter_crc was"):
        other.load_state_dict(one.state_dict(), strict=False)


@pytest.mark.parametrize(
    ("garbage", "message"),
    [
        (None, "the state is a NoneType: give the dict that"),
        ({"epoch": 1}, "the state lacks row, lanes, window_rows, seed"),
        ({"row": -1}, "the state is damaged: row is -1"),
        ({"row": 10**9}, "the state is damaged: row is 1000000000 of 40"),
        ({"epoch": "1", "lanes": 0}, "the state is damaged: epoch is '1'; lanes is 0"),
    ],
    ids=["none", "too-little", "negative", "too-far", "types"],
)
def test_garbage_is_not_a_state(folder: Path, garbage: Any, message: str) -> None:
    (reader,) = ranks_of(written(folder, [20, 20]), 1)
    before = reader.position
    state = garbage if garbage is None or garbage == {"epoch": 1} else {**reader.state_dict(), **garbage}
    with pytest.raises(DataError, match=message):
        reader.load_state_dict(state)
    assert reader.position == before
