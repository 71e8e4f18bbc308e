"""Caches: the same batches, without reading again, within their limit, shared by the processes of a host."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hvd_cluster.data.cache import DiskCache, MemoryCache
from hvd_cluster.data.reader import ParquetReader

ROWS = 400


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Eight row groups of 50 rows, 12 bytes a row."""
    ids = np.arange(ROWS)
    pq.write_table(
        pa.table({"id": ids, "x": ids.astype("f4"), "s": ids.astype(str)}), tmp_path / "a.parquet", row_group_size=50
    )
    return tmp_path / "a.parquet"


def reader(file: Path, cache: Any = None, **options: Any) -> ParquetReader:
    return ParquetReader(file, ["id", "x"], cache=cache, **{"batch_size": 16, "window_bytes": 1200, **options})


def batches(source: ParquetReader) -> list[Any]:
    return [(batch["id"].tolist(), batch["x"].tolist()) for batch in source]


def destroy(file: Path) -> None:
    """Make the rows unreadable; the footer, the size and the time of change stay."""
    status, data = file.stat(), file.read_bytes()
    file.write_bytes(b"\0" * (len(data) * 2 // 3) + data[len(data) * 2 // 3 :])
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_a_second_epoch_reads_nothing_and_gives_the_same_batches(
    file: Path, tmp_path: Path, kind: str, shuffle: bool
) -> None:
    cache = MemoryCache(1 << 20) if kind == "memory" else DiskCache(tmp_path / "cache", 1 << 20)
    expected = [batches(reader(file, shuffle=shuffle, epoch=epoch)) for epoch in (0, 1)]
    cached = reader(file, cache, shuffle=shuffle)
    assert batches(cached) == expected[0]
    destroy(file)
    assert batches(cached) == expected[1]


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_batches_may_be_changed_in_place(file: Path, tmp_path: Path, kind: str) -> None:
    cache = MemoryCache(1 << 20) if kind == "memory" else DiskCache(tmp_path / "cache", 1 << 20)
    cached = reader(file, cache, shuffle=False)
    for batch in cached:
        batch["id"].fill_(-1)
    assert [row for ids, _ in batches(cached) for row in ids] == list(range(ROWS))


def test_a_memory_cache_keeps_what_fits(file: Path) -> None:
    limit_bytes = 2000  # three row groups and something
    cache = MemoryCache(limit_bytes)
    cached = reader(file, cache)
    expected = [batches(reader(file, epoch=epoch)) for epoch in (0, 1)]
    assert [batches(cached), batches(cached)] == expected
    assert 3 * 50 * 12 <= cache.held_bytes <= limit_bytes
    cache.clear()
    assert cache.held_bytes == 0


def test_a_disk_cache_stays_below_its_limit(file: Path, tmp_path: Path) -> None:
    limit_bytes = 12_000
    cached = reader(file, DiskCache(tmp_path / "cache", limit_bytes))
    assert batches(cached) == batches(reader(file))
    files = list((tmp_path / "cache").glob("*.arrow"))
    assert 1 <= len(files) < 8
    assert sum(one.stat().st_size for one in files) <= limit_bytes


def test_what_no_one_uses_makes_room(file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    batches(reader(file, DiskCache(folder, 1 << 20)))
    old = list(folder.glob("*.arrow"))
    hours_ago = time.time() - 3 * 3600
    for one in old:
        os.utime(one, (hours_ago, hours_ago))
    total_bytes = sum(one.stat().st_size for one in old)
    batches(reader(file, DiskCache(folder, total_bytes + 8 * 3200), filters=[("id", ">=", 0)]))
    assert len(list(folder.glob("*.arrow"))) == 16
    batches(reader(file, DiskCache(folder, total_bytes), filters=[("id", ">=", -1)]))
    kept = set(folder.glob("*.arrow"))
    assert len(kept & set(old)) < 8, "the oldest go"
    assert len(kept - set(old)) >= 8, "those in use stay"


@pytest.mark.parametrize("kind", ["memory", "disk", "disk anew"])
def test_a_source_that_changes_is_read_again(file: Path, tmp_path: Path, kind: str) -> None:
    cache = MemoryCache(1 << 20) if kind == "memory" else DiskCache(tmp_path / "cache", 1 << 20)
    batches(reader(file, cache))
    if kind == "disk anew":
        cache = DiskCache(tmp_path / "cache", 1 << 20)
    ids = np.arange(ROWS) + 1000
    pq.write_table(pa.table({"id": ids, "x": ids.astype("f4")}), file, row_group_size=50)
    seen = [row for ids, _ in batches(reader(file, cache, remainder="partial")) for row in ids]
    assert sorted(seen) == list(range(1000, 1000 + ROWS))


def test_another_process_of_the_host_maps_the_same_files(file: Path, tmp_path: Path) -> None:
    script = (
        "import sys; from hvd_cluster.data.reader import ParquetReader; from hvd_cluster.data.cache import DiskCache\n"
        "reader = ParquetReader(sys.argv[1], ['id', 'x'], batch_size=16, window_bytes=1200, "
        "cache=DiskCache(sys.argv[2], 1 << 20))\n"
        "print(sum(int(batch['id'].sum()) for batch in reader))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(file), str(tmp_path / "cache")], capture_output=True, text=True, check=True
    )
    destroy(file)
    cached = reader(file, DiskCache(tmp_path / "cache", 1 << 20))
    assert sum(sum(ids) for ids, _ in batches(cached)) == int(done.stdout)


def test_a_file_that_a_crash_cut_short_is_read_and_written_again(file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    expected = batches(reader(file, DiskCache(folder, 1 << 20)))
    for number, one in enumerate(sorted(folder.glob("*.arrow"))):
        one.write_bytes(b"" if number % 2 else one.read_bytes()[:100])
    (folder / ".unfinished-x.arrow").write_bytes(b"half")
    assert batches(reader(file, DiskCache(folder, 1 << 20))) == expected
    assert not list(folder.glob(".unfinished-*"))
    assert min(one.stat().st_size for one in folder.glob("*.arrow")) > 100


def test_a_cache_that_cannot_be_written_is_only_a_warning(
    file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_bytes(b"a file")
    assert batches(reader(file, DiskCache(tmp_path / "cache", 1 << 20))) == batches(reader(file))
    assert len(caplog.records) == 1, "once, and not for each row group"
    assert "could not keep a row group: [Errno 17] File exists" in caplog.text


def test_text_is_cached_too(file: Path, tmp_path: Path) -> None:
    options: Any = {"decode": {"s": int}, "batch_size": 16, "window_bytes": 2000}
    cached = ParquetReader(file, ["id", "s"], cache=DiskCache(tmp_path / "cache", 1 << 20), **options)
    list(cached)
    destroy(file)
    for batch in cached:
        assert batch["s"].tolist() == batch["id"].tolist()
