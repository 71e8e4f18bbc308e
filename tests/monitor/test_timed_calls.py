"""Readers and saves of this package in the step clock."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hvd_cluster.data import ParquetReader
from hvd_cluster.data.loaders import AsyncDataLoaderMixin, BaseDataLoader
from hvd_cluster.elastic.state import ObjectState
from hvd_cluster.monitor.step_clock import DATA, SAVE, StepTime, step_clock


class Loader(BaseDataLoader):
    def __len__(self) -> int:
        return 4

    def _iterate(self) -> Iterator[int]:
        for number in range(len(self)):
            time.sleep(0.03)
            yield number


class AsyncLoader(AsyncDataLoaderMixin, Loader):
    pass


def largest() -> int:
    (*_, step) = step_clock.recent()
    return max(range(len(StepTime._fields)), key=step.__getitem__)


@pytest.mark.parametrize("loader", [Loader(), AsyncLoader(0), AsyncLoader(2)], ids=["plain", "in-place", "ahead"])
def test_a_wait_for_a_loader_is_data(loader: Any) -> None:
    step_clock.restart()
    for _ in loader:
        step_clock.end_step()
        assert step_clock.num_steps < 2 or largest() == DATA


def test_a_wait_for_a_parquet_reader_is_data(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": list(range(32))}), tmp_path / "a.parquet", row_group_size=8)

    def slow(row: dict[str, Any]) -> dict[str, Any]:
        time.sleep(0.01)
        return row

    step_clock.restart()
    step_clock.end_step()
    with ParquetReader(str(tmp_path), batch_size=32, rank=0, size=1, transformation_fn=slow) as reader:
        assert len(list(reader)) == 1
    step_clock.end_step()
    assert largest() == DATA


def test_a_commit_is_a_save() -> None:
    class Slow(ObjectState):
        def save(self) -> None:
            time.sleep(0.05)

        def _agree(self, update: Any) -> Any:
            return update

    state = Slow(lambda value: value, lambda: 0)
    step_clock.restart()
    step_clock.end_step()
    state.commit()
    step_clock.end_step()
    assert largest() == SAVE
