"""What threads wait for, named while it lasts."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hvd_cluster.data.reading.parquet_files import footer_of
from hvd_cluster.data.reading.read_ahead import ReadAhead
from hvd_cluster.data.schema import infer
from hvd_cluster.data.store import Store
from hvd_cluster.data.writing.part_file import PartFile, PartPlan
from hvd_cluster.errors import DataError
from hvd_cluster.monitor.activities import activity, describe_activities


def test_an_activity_is_named_with_its_thread_while_it_lasts_and_the_outer_one_after_it() -> None:
    with activity("writing a", warns=False):
        with activity("listing b", warns=False):
            (inner,) = describe_activities()
        (outer,) = describe_activities()
    assert inner.startswith("MainThread has been listing b for 0.")
    assert outer.startswith("MainThread has been writing a for 0.")
    assert describe_activities() == []


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_only_one_that_takes_long_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HOROVOD_STALL_CHECK_TIME_SECONDS", "0.2")
    with activity("writing a"):
        wait_for(lambda: bool(caplog.messages))
    with activity("writing b"):
        pass
    with activity("writing c", warns=False):
        time.sleep(0.6)
    assert caplog.messages == ["writing a has taken 0.2 s and is not done"]


def test_a_reader_that_waits_says_which_file_its_threads_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HOROVOD_STALL_CHECK_TIME_SECONDS", "0.5")

    def read(index: int, _: object) -> int:
        with activity(f"reading row group {index} of part-0.parquet", warns=False):
            time.sleep(2.5 if index == 1 else 0.0)
        return index

    ahead = ReadAhead(read, [1, 1], num_threads=1, limit_bytes=1)
    try:
        assert [ahead.take(), ahead.take()] == [0, 1]
    finally:
        ahead.close()
    (message,) = caplog.messages
    assert message.startswith(
        "the next rows have not come for 1 s: hvd-reader-0 has been reading row group 1 of part-0"
    )
    assert "<locals>.read (tests/monitor/test_activities.py:" in message


def test_a_write_to_a_filesystem_that_hangs_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HOROVOD_STALL_CHECK_TIME_SECONDS", "0.3")
    store = Store.create(str(tmp_path))
    release = threading.Event()
    monkeypatch.setattr("hvd_cluster.data.files.filesystems.write_whole", lambda *_, **__: release.wait())
    thread = threading.Thread(target=store.write, args=(f"{tmp_path}/checkpoint", b"1"))
    thread.start()
    wait_for(lambda: bool(caplog.messages))
    release.set()
    thread.join()
    assert caplog.messages == [f"writing {tmp_path}/checkpoint has taken 0.3 s and is not done"]


@pytest.mark.parametrize("reads", ["a file", "a footer"])
def test_a_read_of_a_local_path_that_hangs_is_warned_of(
    reads: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A local path may be a mount of a server that does not answer; here it is a pipe that no process writes."""
    monkeypatch.setenv("HOROVOD_STALL_CHECK_TIME_SECONDS", "0.3")
    path = str(tmp_path / "part.parquet")
    os.mkfifo(path)
    store = Store.create(str(tmp_path))
    call = partial(store.read, path) if reads == "a file" else partial(footer_of, store.fs, path)

    def read() -> None:
        with pytest.raises((OSError, DataError), match="lseek failed|is not a whole Parquet file"):
            call()

    thread = threading.Thread(target=read)
    thread.start()
    wait_for(lambda: bool(caplog.messages))
    Path(path).write_bytes(b"")
    thread.join()
    what = "reading" if reads == "a file" else "reading the footer of"
    assert caplog.messages == [f"{what} {path} has taken 0.3 s and is not done"]


def test_a_write_of_a_part_that_hangs_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HOROVOD_STALL_CHECK_TIME_SECONDS", "0.3")
    batch = pa.record_batch({"x": np.zeros(40_000)})
    folders = {"train_folder": str(tmp_path), "validation_folder": "", "validation": None}
    part = PartFile(
        PartPlan(store=Store.create(str(tmp_path)), schema=infer(batch.schema), **folders), f"{tmp_path}/part.parquet"
    )
    write, release = pq.ParquetWriter.write_table, threading.Event()
    monkeypatch.setattr(pq.ParquetWriter, "write_table", lambda *args: (release.wait(), write(*args)))
    thread = threading.Thread(target=part.add, args=(batch,))
    thread.start()
    wait_for(lambda: bool(caplog.messages))
    release.set()
    thread.join()
    assert caplog.messages == [f"writing {tmp_path}/part.parquet has taken 0.3 s and is not done"]
    assert sum(group.rows for group in part.close()) == 40_000
