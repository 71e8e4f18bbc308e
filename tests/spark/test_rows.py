"""Rows that a job's tasks get before their workers start: deaths, full disks and crowded clusters on the way."""

from __future__ import annotations

import os
import stat
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import hvd_cluster.spark
from hvd_cluster.errors import LaunchError, StartTimeoutError, WorkerFailedError
from hvd_cluster.spark import job
from hvd_cluster.spark.task_function import Rows

RECEIVER = "hvd_cluster.data.writing.part_transfer:received"
#: A module for executors: what a task does with its rows is not done well there.
BAD_RECEIVERS = """
import contextlib, errno, os, signal
from hvd_cluster.data.writing import part_transfer

@contextlib.contextmanager
def dies(batches):
    next(iter(batches))
    os.kill(os.getpid(), signal.SIGKILL)
    yield {}

@contextlib.contextmanager
def finds_no_room(batches):
    def pwrite(descriptor, data, at):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    write, os.pwrite = os.pwrite, pwrite
    try:
        with part_transfer.received(batches) as variables:
            yield variables
    finally:
        os.pwrite = write
"""


def _frame(spark: Any, count: int = 8) -> Any:
    return spark.range(0, count, 1, 2).selectExpr(
        "CAST(id AS int) AS part", "concat('file-', id) AS name", "0L AS at", "encode(name, 'UTF-8') AS data"
    )


def _rows(frame: Any, receiver: str = RECEIVER) -> Rows:
    return Rows(frame, "part", receiver)


def _names() -> list[str]:
    return sorted(path.name for path in Path(os.environ["HOROVOD_ROWS_DIR"]).glob("file-*"))


@pytest.fixture
def bad_receivers(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Executors' Pythons find BAD_RECEIVERS."""
    (tmp_path / "bad_receivers.py").write_text(BAD_RECEIVERS)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}:$PYTHONPATH" exec "{sys.executable}" "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(spark.sparkContext, "pythonExec", str(python))


@pytest.mark.spark
def test_each_row_reaches_one_task(spark: Any) -> None:
    found = hvd_cluster.spark.run(_names, num_proc=2, rows=_rows(_frame(spark)))
    assert sorted(found[0] + found[1]) == [f"file-{number}" for number in range(8)]


@pytest.mark.spark("local", "local-cluster")
def test_a_task_that_dies_while_its_rows_arrive_is_a_death(spark: Any, bad_receivers: None) -> None:
    with pytest.raises(WorkerFailedError, match=r"task of partition \d on host \S+ was lost") as raised:
        hvd_cluster.spark.run(_names, num_proc=2, rows=_rows(_frame(spark), "bad_receivers:dies"))
    assert raised.value.died


@pytest.mark.spark("local", "local-cluster")
def test_a_disk_without_room_for_the_rows_is_named_and_is_not_a_death(spark: Any, bad_receivers: None) -> None:
    with pytest.raises(LaunchError, match="the workers cannot start: .*hvd-rows-.*No space left on device") as raised:
        hvd_cluster.spark.run(_names, num_proc=2, rows=_rows(_frame(spark), "bad_receivers:finds_no_room"))
    assert type(raised.value) is LaunchError


def _slow_rows(spark: Any, seconds: float) -> Rows:
    def wait(batches: Any) -> Any:
        time.sleep(seconds)
        yield from batches

    frame = _frame(spark)
    return _rows(frame.mapInArrow(wait, frame.schema))


@pytest.mark.spark
@pytest.mark.slow
def test_rows_may_take_longer_than_tasks_may_take_to_start(spark: Any) -> None:
    found = hvd_cluster.spark.run(_names, num_proc=2, rows=_slow_rows(spark, 20.0), start_timeout=15)
    assert len(found[0] + found[1]) == 8


@pytest.mark.spark
@pytest.mark.slow
def test_workers_without_room_are_given_up_though_there_was_room_to_make_their_rows(
    spark: Any, spark_slots: int, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def occupy() -> None:
        (tmp_path / "running").touch()
        while not (tmp_path / "leave").exists():
            time.sleep(0.05)

    monkeypatch.setattr(job, "_EXPLAIN_S", 1.0)
    thread = threading.Thread(target=lambda: hvd_cluster.spark.run(occupy, num_proc=spark_slots - 1, spark=spark))
    thread.start()
    try:
        deadline_s = time.monotonic() + 60
        while not (tmp_path / "running").exists():
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        with pytest.raises(StartTimeoutError, match="Timed out waiting for Spark tasks to start"):
            hvd_cluster.spark.run(_names, num_proc=spark_slots, rows=_slow_rows(spark, 2.0), start_timeout=8)
    finally:
        (tmp_path / "leave").touch()
        thread.join()
    assert [text for text in caplog.messages if text.startswith("still waiting for Spark to start the workers")]
