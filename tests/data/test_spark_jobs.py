"""An interrupt ends the Spark job that is waited for, and nothing of what it wrote stays."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hvd_cluster.data.materializing import materialize
from hvd_cluster.data.spark_jobs import run
from hvd_cluster.data.store import Store
from hvd_cluster.petastorm.converter import make_spark_converter

pytestmark = pytest.mark.spark("local", "connect")

#: An orphaned task would be seen after that: it says five times a second that it lives.
LATER_S = 4.0
#: So long after its job Spark lets a Python worker live.
LAST_BEAT_S = 2.5


@pytest.fixture
def beats(tmp_path: Path) -> Path:
    """The folder in which tasks say that they live."""
    folder = tmp_path / "beats"
    folder.mkdir()
    return folder


@pytest.fixture
def endless(spark: Any, beats: Path) -> Any:
    """A DataFrame of two partitions that have no end for a minute."""
    folder = str(beats)

    def rows(batches: Any) -> Any:
        import os
        import time

        import pyarrow as pa

        for _ in batches:
            for _ in range(300):
                Path(folder, str(os.getpid())).touch()
                yield pa.RecordBatch.from_pydict({"id": list(range(10_000))})
                time.sleep(0.2)

    return spark.range(0, 2, 1, 2).mapInArrow(rows, "id long")


@contextlib.contextmanager
def interrupted_when(both_tasks_run: Path, ready: Path) -> Iterator[None]:
    """A Ctrl-C as soon as both tasks run and there is something in ``ready``."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.1):
            if len(list(both_tasks_run.iterdir())) == 2 and any(path.is_file() for path in ready.rglob("*part-*")):
                os.kill(os.getpid(), signal.SIGINT)
                return

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        over.set()
        thread.join()


@pytest.mark.each_kind
def test_an_interrupted_materialize_leaves_no_task_and_no_file(endless: Any, beats: Path, tmp_path: Path) -> None:
    store = Store.create(tmp_path / "store")
    with interrupted_when(beats, tmp_path / "store"):
        materialize(endless, store, columns=["id"], validation=0.25)
    ended = time.time()
    assert store.list(store.prefix) == []
    time.sleep(LATER_S)
    assert store.list(store.prefix, recursive=True) == []
    assert max(path.stat().st_mtime for path in beats.iterdir()) < ended + LAST_BEAT_S


def test_an_interrupted_converter_leaves_no_task_and_no_file(endless: Any, beats: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    with interrupted_when(beats, tmp_path / "cache"):
        make_spark_converter(endless, parent_cache_dir_url=(tmp_path / "cache").as_uri())
    ended = time.time()
    assert list((tmp_path / "cache").iterdir()) == []
    time.sleep(LATER_S)
    assert list((tmp_path / "cache").iterdir()) == []
    assert max(path.stat().st_mtime for path in beats.iterdir()) < ended + LAST_BEAT_S


def test_what_an_action_raises_is_raised_and_the_session_continues(spark: Any) -> None:
    with pytest.raises(ZeroDivisionError, match="by zero"):
        run(spark, lambda: 1 // 0, "a mistake")
    assert run(spark, spark.range(3).count, "a count") == 3
