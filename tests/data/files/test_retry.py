"""Trouble of a moment passes unseen; trouble that stays is told, with the file and row group."""

from __future__ import annotations

import errno
import functools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.local import LocalFileSystem

from hvd_cluster.data.cache import DiskCache, MemoryCache
from hvd_cluster.data.files import retry
from hvd_cluster.data.reader import ParquetReader
from hvd_cluster.errors import DataError
from hvd_cluster.petastorm import make_reader, write_dataset
from hvd_cluster.petastorm.codecs import ScalarCodec
from hvd_cluster.petastorm.spark_types import LongType
from hvd_cluster.petastorm.unischema import Unischema, UnischemaField


class Unsteady(LocalFileSystem):
    """A remote filesystem whose every n-th read of bytes fails, in all of its instances."""

    protocol = "unsteady"
    cachable = False
    calls = 0
    fails_every = 3

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        file = super()._open(path, mode, **options)
        read = file.f.read

        class Handle:
            def __getattr__(self, name: str) -> Any:
                return getattr(file, name)

            def read(self, *args: Any) -> bytes:
                Unsteady.calls += 1
                if Unsteady.calls % Unsteady.fails_every == 0:
                    raise OSError("the server reset the connection")
                return read(*args)

        return Handle()


class Throttled(LocalFileSystem):
    """A remote filesystem that answers the first question of each kind about each path with 503; it takes writes."""

    protocol = "throttled"
    cachable = False

    def __init__(self, lasting: str = "") -> None:
        super().__init__()
        self.lasting = lasting
        self.asked: set[tuple[str, str]] = set()

    def _ask(self, kind: str, path: str) -> None:
        if (kind, path) not in self.asked or kind == self.lasting:
            self.asked.add((kind, path))
            raise OSError(f"AWS Error SLOW_DOWN (HTTP status 503): {kind}")

    def info(self, path: Any, **options: Any) -> Any:
        if isinstance(path, str):  # not an entry of a folder that is being listed
            self._ask("info", path)
        return super().info(path, **options)

    def find(self, path: str, *args: Any, **options: Any) -> Any:
        self._ask("find", path)
        return super().find(path, *args, **options)

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if "r" in mode:
            self._ask("open", path)
        return super()._open(path, mode, **options)


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(retry, "FIRST_WAIT_S", 0.001)
    return


@pytest.fixture
def file(tmp_path: Path) -> Path:
    pq.write_table(pa.table({"id": np.arange(100)}), tmp_path / "a.parquet", row_group_size=10)
    return tmp_path / "a.parquet"


def test_reads_that_fail_now_and_then_are_made_again(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    Unsteady.fails_every = 7
    reader = ParquetReader(str(file), filesystem=Unsteady(), batch_size=5, window_bytes=160)
    assert sorted(row for batch in reader for row in batch["id"].tolist()) == list(range(100))
    assert "the server reset the connection" in caplog.text
    assert "attempt 2 of 5 follows" in caplog.text


def test_a_server_that_stays_away_is_named_with_the_row_group(file: Path) -> None:
    Unsteady.fails_every = 10**9
    reader = ParquetReader(str(file), filesystem=Unsteady(), batch_size=5, window_bytes=160)
    Unsteady.fails_every = 1
    with pytest.raises(DataError, match=r"cannot read row group \d+ of .*a\.parquet: the server reset"):
        list(reader)


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_a_cache_and_its_look_at_the_files_stand_a_moment_of_throttling(file: Path, tmp_path: Path, kind: str) -> None:
    def read(filesystem: Throttled) -> list[int]:
        cache = MemoryCache(1 << 20) if kind == "memory" else DiskCache(tmp_path / "cache", 1 << 20)
        reader = ParquetReader(str(file), filesystem=filesystem, batch_size=5, cache=cache)
        filesystem.asked.clear()  # what opening the data set has asked may be asked again
        return sorted(row for batch in reader for row in batch["id"].tolist())

    assert read(Throttled()) == list(range(100))
    reader = ParquetReader(str(file), filesystem=(away := Throttled()), batch_size=5, cache=MemoryCache(1 << 20))
    away.lasting = "info"
    with pytest.raises(DataError, match=r"cannot read row group \d+ of .*a\.parquet: its size and time.*503"):
        list(reader)


@pytest.mark.needs("fsspec>=2024.6")  # an older one looks for the file that it moves
def test_a_petastorm_reader_stands_a_moment_of_throttling(tmp_path: Path) -> None:
    schema = Unischema("Rows", [UnischemaField("id", np.int64, (), ScalarCodec(LongType()), False)])
    url = str(tmp_path / "rows")
    assert write_dataset(url, schema, [{"id": i} for i in range(20)], row_group_rows=5, filesystem=Throttled()) == 20
    with make_reader(url, filesystem=(filesystem := Throttled()), shuffle_row_groups=False) as reader:
        assert filesystem.asked >= {("open", f"{url}/_common_metadata"), ("find", url)}
        assert [int(row.id) for row in reader] == list(range(20))
    for lasting, message in (("info", "cannot look at .*rows: .*503"), ("open", "cannot read .*_metadata: .*503")):
        with pytest.raises(DataError, match=message):
            make_reader(url, filesystem=Throttled(lasting))


def test_calls_end_after_a_number_of_attempts() -> None:
    filesystem, calls = pa.fs.PyFileSystem(pa.fs.FSSpecHandler(Unsteady())), []

    def fail(error: OSError) -> None:
        calls.append(error)
        raise error

    with pytest.raises(OSError, match="slow down"):
        retry.retried(functools.partial(fail, OSError("slow down")), filesystem, "reading", num_attempts=3)
    assert len(calls) == 3
    calls.clear()
    for lasting in (FileNotFoundError("gone"), PermissionError("no"), OSError(errno.ENOSPC, "full")):
        with pytest.raises(type(lasting)):
            retry.retried(functools.partial(fail, lasting), filesystem, "reading")
    assert len(calls) == 3, "what no second attempt changes is not tried again"


@pytest.mark.parametrize(
    ("error", "local", "passes"),
    [
        (OSError(errno.EIO, "disk"), True, True),
        (OSError(errno.ESTALE, "nfs"), True, True),
        (OSError("Couldn't deserialize thrift"), True, False),
        (OSError("Couldn't deserialize thrift"), False, True),
        (ConnectionResetError("reset"), False, True),
        (FileNotFoundError("gone"), False, False),
        (OSError(errno.EROFS, "read-only"), False, False),
        (OSError("When listing: AWS Error ACCESS_DENIED during ListObjectsV2 operation: Forbidden"), False, False),
        (OSError("AWS Error UNKNOWN (HTTP status 403) during HeadObject operation: No response body."), False, False),
        (OSError("AWS Error SLOW_DOWN during PutObject operation: Please reduce your request rate."), False, True),
        (OSError("AWS Error UNKNOWN (HTTP status 503) during HeadObject operation: No response body."), False, True),
    ],
)
def test_which_errors_may_pass(error: OSError, local: bool, passes: bool) -> None:
    assert retry.may_pass(error, local=local) is passes
