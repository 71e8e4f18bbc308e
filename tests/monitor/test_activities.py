"""What threads wait for, named while it lasts."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from hvd_cluster.data.reading.read_ahead import ReadAhead
from hvd_cluster.data.store import Store
from hvd_cluster.monitor.activities import activity, describe_activities


def test_an_activity_is_named_with_its_thread_while_it_lasts_and_the_outer_one_after_it() -> None:
    with activity("writing a", warns=False):
        with activity("listing b", warns=False):
            (inner,) = describe_activities()
        (outer,) = describe_activities()
    assert inner.startswith("MainThread has been listing b for 0.")
    assert outer.startswith("MainThread has been writing a for 0.")
    assert describe_activities() == []


def test_only_one_that_takes_long_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HOROVOD_STALL_CHECK_TIME_SECONDS", "0.2")
    with activity("writing a"):
        time.sleep(0.6)
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
    while not caplog.messages:
        time.sleep(0.05)
    release.set()
    thread.join()
    assert caplog.messages == [f"writing {tmp_path}/checkpoint has taken 0.3 s and is not done"]
