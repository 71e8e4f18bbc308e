"""What a petastorm reader does after an error, and when it is stopped."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hvd_cluster.petastorm import TransformSpec, make_batch_reader

pytestmark = pytest.mark.parametrize("pool", ["thread", "dummy"])


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Four row groups of ten rows."""
    pq.write_table(pa.table({"id": range(40)}), tmp_path / "a.parquet", row_group_size=10)
    return str(tmp_path)


def test_an_error_costs_one_row_group_and_the_end_is_an_end(url: str, pool: str) -> None:
    def fails(frame: pd.DataFrame) -> pd.DataFrame:
        if frame["id"].iloc[0] == 10:
            raise ValueError("bad")
        return frame

    found: list[Any] = []
    options: Any = {"reader_pool_type": pool, "shuffle_row_groups": False}
    with make_batch_reader(url, transform_spec=TransformSpec(fails), **options) as reader:
        for _ in range(5):
            try:
                found.append(int(next(reader).id[0]))
            except (ValueError, StopIteration) as error:
                found.append(type(error))
    assert found == [0, ValueError, 20, 30, StopIteration]


def test_a_reader_that_another_thread_stops_gives_no_half_a_row_group_and_begins_no_threads(
    url: str, pool: str
) -> None:
    begun, go_on, told = threading.Event(), threading.Event(), []

    def waits(frame: pd.DataFrame) -> pd.DataFrame:
        begun.set()
        go_on.wait(30)
        return frame

    reader = make_batch_reader(url, num_epochs=None, reader_pool_type=pool, transform_spec=TransformSpec(waits))

    def consume() -> None:
        try:
            told.append(next(reader))
        except RuntimeError as error:
            told.append(str(error))

    consumer, stopper = threading.Thread(target=consume, daemon=True), threading.Thread(target=reader.stop, daemon=True)
    consumer.start()
    assert begun.wait(30)
    stopper.start()
    stopper.join(0.1)
    go_on.set()
    stopper.join(30)
    consumer.join(30)
    assert told == ["the reader was stopped (its `with` block has ended): make another one"]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hvd-reader")]
