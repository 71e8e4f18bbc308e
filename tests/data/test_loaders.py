"""``horovod.data`` and the loaders over petastorm's readers."""

from __future__ import annotations

import importlib
import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hvd_cluster.data.loaders import AsyncDataLoaderMixin, BaseDataLoader
from hvd_cluster.errors import DataError
from hvd_cluster.petastorm import TransformSpec, loaders, make_batch_reader, make_reader


class Numbers(BaseDataLoader):
    """0, 1, ..., each doubled on its way out."""

    def __init__(self, count: int, fails_at: int = -1) -> None:
        self.count, self.fails_at, self.made = count, fails_at, 0

    def __len__(self) -> int:
        return self.count

    def _iterate(self) -> Iterator[int]:
        for number in range(self.count):
            if number == self.fails_at:
                raise KeyError("the data is broken")
            self.made += 1
            yield number

    def _process_batch(self, batch: int) -> int:
        return 2 * batch


class AsyncNumbers(AsyncDataLoaderMixin, Numbers):
    """The same in advance."""


@pytest.mark.parametrize("size", [0, 1, 64])
def test_batches_come_in_order_and_again(size: int) -> None:
    loader = AsyncNumbers(size, False, 5)
    assert list(Numbers(5)) == list(loader) == list(loader) == [0, 2, 4, 6, 8]
    assert len(loader) == 5


def test_a_with_block_ends_the_threads_of_a_loader() -> None:
    before = threading.active_count()
    loader = AsyncNumbers(3, False, 1_000_000)

    def fails() -> None:
        with loader as entered:
            assert entered is loader
            next(iter(loader))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert threading.active_count() == before


def test_no_more_is_loaded_in_advance_than_may_wait() -> None:
    loader = AsyncNumbers(3, True, 1_000_000)
    batches = iter(loader)
    assert [next(batches) for _ in range(2)] == [0, 2]
    # Those taken, those that wait, and the one that waits to wait.
    assert loader.made <= 2 + 3 + 1
    loader.close_async_loader()
    assert len(list(batches)) <= 4
    assert not [thread for thread in threading.enumerate() if thread.name == "hvd-async-loader"]


def test_an_iteration_that_is_left_ends_its_thread() -> None:
    for batch in AsyncNumbers(2, False, 1_000_000):
        assert batch == 0
        break
    assert not [thread for thread in threading.enumerate() if thread.name == "hvd-async-loader"]


def test_what_is_raised_while_loading_is_raised_where_the_batch_is_wanted() -> None:
    batches = iter(AsyncNumbers(8, False, 5, fails_at=2))
    assert [next(batches), next(batches)] == [0, 2]
    with pytest.raises(KeyError, match="the data is broken"):
        next(batches)


class Restarting(BaseDataLoader):
    """Over an iterator that gives 0, 1, 2 and ends, and then starts again by itself."""

    def __init__(self) -> None:
        self._next = -1

    def __len__(self) -> int:
        return 3

    def _iterate(self) -> Iterator[int]:
        return map(self._number, itertools.repeat(None))  # which can be asked again after an end that a call raises

    def _number(self, _: None) -> int:
        self._next = (self._next + 1) % 4
        if self._next == 3:
            raise StopIteration
        return self._next


class AsyncRestarting(AsyncDataLoaderMixin, Restarting):
    """The same in advance."""


def test_an_iterator_that_starts_again_loses_no_batch_between_epochs() -> None:
    loader = AsyncRestarting(2, False)
    for _ in range(3):
        epoch = []
        for batch in loader:
            time.sleep(0.05)  # for the thread to go as far as it does
            epoch.append(batch)
        assert epoch == [0, 1, 2]


@pytest.fixture
def url(tmp_path: Path) -> str:
    pq.write_table(pa.table({"id": np.arange(20), "x": np.arange(20) / 2}), tmp_path / "rows.parquet")
    return tmp_path.as_uri()


def ids(batches: Any) -> list[int]:
    return [number for batch in batches for number in batch["id"].tolist()]


@pytest.mark.parametrize("kind", ["PytorchDataLoader", "PytorchAsyncDataLoader"])
def test_a_loader_begins_again_in_each_epoch(url: str, kind: str) -> None:
    with make_batch_reader(url, shuffle_row_groups=False) as reader:
        own = {"async_loader_queue_size": 2} if "Async" in kind else {}
        loader = getattr(loaders, kind)(reader=reader, batch_size=8, **own)
        assert ids(loader) == ids(loader) == list(range(20))
        with pytest.raises(TypeError, match="limit_step_per_epoch"):
            len(loader)


@pytest.mark.parametrize("kind", ["PytorchDataLoader", "PytorchAsyncDataLoader"])
def test_each_epoch_is_shuffled_in_an_order_of_its_own_which_the_seed_repeats(url: str, kind: str) -> None:
    def epochs() -> list[list[int]]:
        own = {"async_loader_queue_size": 2} if "Async" in kind else {}
        with make_batch_reader(url, shuffle_row_groups=False, seed=3) as reader:
            loader = getattr(loaders, kind)(reader=reader, batch_size=8, shuffling_queue_capacity=20, **own)
            return [ids(loader) for _ in range(3)]

    first = epochs()
    assert all(sorted(epoch) == list(range(20)) for epoch in first)
    assert len(set(map(tuple, first))) == 3
    assert epochs() == first


@pytest.mark.parametrize(("batch_size", "limit"), [(5, 4), (8, 2), (10, 1), (20, 1), (5, 3)])
@pytest.mark.parametrize("kind", ["PytorchDataLoader", "PytorchAsyncDataLoader"])
def test_each_epoch_has_as_many_batches_as_the_limit_says(url: str, kind: str, batch_size: int, limit: int) -> None:
    with make_batch_reader(url, shuffle_row_groups=False) as reader:
        own = {"async_loader_queue_size": 2} if "Async" in kind else {}
        loader = getattr(loaders, kind)(reader=reader, batch_size=batch_size, limit_step_per_epoch=limit, **own)
        assert [sum(1 for _ in loader) for _ in range(5)] == [limit] * 5


def test_an_epoch_begins_where_the_last_one_has_left_the_reader(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": np.arange(20)}), tmp_path / "rows.parquet", row_group_size=5)
    with make_batch_reader(tmp_path.as_uri(), shuffle_row_groups=False) as reader:
        loader = loaders.PytorchDataLoader(reader=reader, batch_size=5, limit_step_per_epoch=1)
        assert {number for _ in range(4) for number in ids(loader)} == set(range(20))


@pytest.mark.parametrize("kind", ["PytorchInfiniteDataLoader", "PytorchInfiniteAsyncDataLoader"])
def test_an_infinite_loader_continues_after_an_epoch_that_was_left_early(url: str, kind: str) -> None:
    with make_batch_reader(url, shuffle_row_groups=False, num_epochs=None) as reader:
        loader = getattr(loaders, kind)(reader=reader, batch_size=10)
        next(iter(loader))
        later = [ids(itertools.islice(loader, 2)) for _ in range(3)]
        assert {tuple(sorted(epoch)) for epoch in later} == {tuple(range(20))}
        if "Async" not in kind:
            assert later[0] == [*range(10, 20), *range(10)]


@pytest.mark.parametrize("kind", ["PytorchInfiniteDataLoader", "PytorchInfiniteAsyncDataLoader"])
def test_an_infinite_loader_continues_where_the_last_epoch_ended(url: str, kind: str) -> None:
    with make_batch_reader(url, shuffle_row_groups=False, num_epochs=None) as reader:
        loader = getattr(loaders, kind)(reader=reader, batch_size=5, limit_step_per_epoch=3)
        assert len(loader) == 3
        assert ids(loader) == list(range(15))
        assert ids(loader) == [*range(15, 20), *range(10)]


@pytest.mark.parametrize("kind", ["PytorchInfiniteDataLoader", "PytorchInfiniteAsyncDataLoader"])
def test_an_infinite_loader_continues_after_a_row_group_that_failed(tmp_path: Path, kind: str) -> None:
    pq.write_table(pa.table({"id": np.arange(20)}), tmp_path / "rows.parquet", row_group_size=5)
    failures = ["the second row group"]

    def fails_once(frame: Any) -> Any:
        if frame["id"][0] == 5 and failures:
            raise ValueError(failures.pop())
        return frame

    options: Any = {"transform_spec": TransformSpec(fails_once), "reader_pool_type": "dummy"}
    with make_batch_reader(tmp_path.as_uri(), shuffle_row_groups=False, num_epochs=None, **options) as reader:
        loader = getattr(loaders, kind)(reader=reader, batch_size=5, limit_step_per_epoch=3)
        with pytest.raises(ValueError, match="the second row group"):
            ids(loader)
        assert ids(loader) == [*range(10, 20), *range(5)]
        assert ids(loader) == list(range(5, 20))


@pytest.mark.parametrize("kind", ["PytorchInmemDataLoader", "PytorchInmemAsyncDataLoader"])
def test_a_loader_in_memory_reads_once(url: str, kind: str) -> None:
    reader = make_batch_reader(url, shuffle_row_groups=False)
    loader = getattr(loaders, kind)(reader=reader, batch_size=10, num_epochs=None, limit_step_per_epoch=2)
    for _ in range(3):
        assert ids(loader) == list(range(20))


@pytest.mark.parametrize("kind", ["PytorchInmemDataLoader", "PytorchInmemAsyncDataLoader"])
def test_an_epoch_in_memory_without_a_limit_is_one_pass(url: str, kind: str) -> None:
    loader = getattr(loaders, kind)(reader=make_batch_reader(url, shuffle_row_groups=False), batch_size=8)
    assert len(loader) == 3
    for _ in range(3):
        assert ids(itertools.islice(loader, 9)) == list(range(20))


@pytest.mark.parametrize("make", [make_reader, make_batch_reader])
@pytest.mark.parametrize("pool", ["thread", "dummy"])
def test_a_loader_over_a_reader_that_was_stopped_ends(tmp_path: Path, make: Any, pool: str) -> None:
    """Its thread sits in the reader while the main thread leaves the reader's block."""
    pq.write_table(pa.table({"x": np.arange(100.0)}), tmp_path / "rows.parquet", row_group_size=5)

    def slow(rows: Any) -> Any:
        time.sleep(0.01)
        return rows

    for pause_s in (0.0, 0.02, 0.05):
        options = {"reader_pool_type": pool, "workers_count": 1, "transform_spec": TransformSpec(slow)}
        with make(tmp_path.as_uri(), num_epochs=None, **options) as reader:
            loader = loaders.PytorchInfiniteAsyncDataLoader(8, False, reader, 10, limit_step_per_epoch=10_000)
            batches = iter(loader)
            next(batches)
            time.sleep(pause_s)
        closing = threading.Thread(target=loader.close_async_loader, daemon=True)
        closing.start()
        closing.join(30)
        assert not closing.is_alive()
        del batches
        names = {thread.name for thread in threading.enumerate()}
        assert not [name for name in names if name.startswith(("hvd-reader", "hvd-async-loader"))]


def test_a_loader_over_a_stopped_reader_raises_what_the_reader_raises(url: str) -> None:
    with make_batch_reader(url, num_epochs=None) as reader:
        batches = iter(loaders.PytorchInfiniteAsyncDataLoader(2, False, reader, 5, limit_step_per_epoch=10_000))
        next(batches)
    with pytest.raises(RuntimeError, match="the reader was stopped"):
        list(batches)


@pytest.mark.slow
def test_a_program_that_ends_during_an_iteration_ends_quietly() -> None:
    program = Path(__file__).parent / "programs" / "exits_while_loading.py"
    ended = subprocess.run([sys.executable, program], capture_output=True, text=True, check=True, timeout=100)
    assert ended.stdout.split() == ["0"] * 12
    assert ended.stderr == ""


def test_a_limit_that_makes_no_sense_is_refused(url: str) -> None:
    with make_batch_reader(url) as reader, pytest.raises(DataError, match="limit_step_per_epoch is 0"):
        loaders.PytorchDataLoader(reader, 5, limit_step_per_epoch=0)


def test_old_paths_lead_here() -> None:
    root = importlib.import_module("hvd_cluster.data.data_loader_base")
    assert root.AsyncDataLoaderMixin is AsyncDataLoaderMixin
