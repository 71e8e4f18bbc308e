"""The memory that a reader takes stays below the bound that it states, however large the data is."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from hvd_cluster.data.cache import MemoryCache
from hvd_cluster.data.reader import ParquetReader
from hvd_cluster.data.reading import budget
from hvd_cluster.data.reading.footers import FooterCache, memory_bytes
from hvd_cluster.data.reading.interleave import SLAB_BYTES

#: Reads an epoch and tells how far the process has grown beyond what it was after a few batches of other data.
SCRIPT = """
import json, re, sys
import torch
from hvd_cluster.data.reader import ParquetReader

def kib(name):
    return int(re.search(rf"{name}:\\s+(\\d+) kB", open("/proc/self/status").read())[1])

torch.set_num_threads(1)
small, large, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
options["decode"] = {name: len for name in options.pop("measure", ())}
if options.pop("transformed", False):
    options["transformation_fn"] = lambda row: {"y": row["y"], "length": len(row["s"])}
for _ in ParquetReader(small, **options):
    pass
reader = ParquetReader(large, **options)
before = kib("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # the peak counts from here
rows = sum(len(batch["y"]) for batch in reader)
print(json.dumps({"rows": rows, "grown": (kib("VmHWM") - before) * 1024, "bound": reader.memory_bytes}))
"""

MIB = 1 << 20
OPTIONS: dict[str, Any] = {
    "batch_size": 256,
    "prefetch_bytes": 8 * MIB,
    "window_bytes": 2 * MIB,
    "remainder": "partial",
}


def zeros(random: np.random.Generator) -> pa.Table:
    """A file of them is small."""
    return pa.table({"y": pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(16 * 8192, dtype="f4")), 16)})


def texts(random: np.random.Generator) -> pa.Table:
    """Rows of about 3 KB, of few distinct values: ten bits of a row are in the file."""
    words = pa.array([f"{index:04d}" + "x" * int(random.integers(2000, 4000)) for index in range(100)])
    return pa.table({"s": words.take(pa.array(random.integers(0, 100, 512))), "y": np.arange(512)})


def ragged(random: np.random.Generator) -> pa.Table:
    lengths = random.integers(1, 129, 4096)
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype("i4"))
    values = pa.array(random.integers(0, 20, int(lengths.sum())))
    return pa.table({"t": pa.ListArray.from_arrays(offsets, values), "y": np.arange(4096)})


def one_number(random: np.random.Generator) -> pa.Table:
    """Rows of four bytes: an index of a row takes more than the row."""
    return pa.table({"y": np.zeros(1 << 19, dtype="f4")})


def wide(random: np.random.Generator) -> pa.Table:
    columns = {f"f{index}": random.integers(0, 50, 2048).astype("f8") for index in range(100)}
    return pa.table({**columns, "y": np.arange(2048)})


def write(path: Path, group: pa.Table, num_bytes: int) -> int:
    """Row groups that take so many bytes in memory; returns the number of rows."""
    groups = -(-num_bytes // int(group.nbytes))
    with pq.ParquetWriter(path, group.schema) as writer:
        for _ in range(groups):
            writer.write_table(group)
    return groups * len(group)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (zeros, {}),
        (texts, {"measure": ["s"]}),
        pytest.param(ragged, {"shapes": {"t": [128]}, "pad": {"t": 0}}, marks=pytest.mark.slow),
        pytest.param(ragged, {"shapes": {"t": [16]}, "pad": {"t": 0}}, marks=pytest.mark.slow),
        pytest.param(wide, {}, marks=pytest.mark.slow),
        pytest.param(one_number, {}, marks=pytest.mark.slow),
        pytest.param(texts, {"transformed": True}, marks=pytest.mark.slow),
    ],
    ids=["zeros", "dictionary-texts", "ragged-padded", "ragged-cut", "wide", "one-number", "texts-transformed"],
)
def test_a_data_set_of_twenty_times_the_bound_is_read_below_the_bound(
    tmp_path: Path, make: Callable[[np.random.Generator], pa.Table], options: dict[str, Any]
) -> None:
    group = make(np.random.default_rng(0))
    write(tmp_path / "small.parquet", group, 8 * MIB)
    plain = {name: value for name, value in options.items() if name not in {"measure", "transformed"}}
    decode = dict.fromkeys(options.get("measure", ()), len)
    transform = (lambda row: {"y": row["y"]}) if "transformed" in options else None
    small = ParquetReader(tmp_path / "small.parquet", decode=decode, transformation_fn=transform, **OPTIONS, **plain)
    bound = small.memory_bytes
    assert bound <= 64 * MIB
    rows = write(tmp_path / "large.parquet", group, 20 * bound)
    paths = [str(tmp_path / "small.parquet"), str(tmp_path / "large.parquet")]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *paths, json.dumps({**OPTIONS, **options})],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["rows"] == rows
    assert found["grown"] <= found["bound"]


@pytest.mark.long
def test_blocks_that_wait_hold_no_indices_of_their_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "CHUNK_BYTES", MIB)
    write(tmp_path / "a.parquet", pa.table({"y": np.zeros(1 << 18, dtype="f4")}), 16 * MIB)
    reader = ParquetReader(tmp_path, batch_size=256, window_bytes=2 * MIB, num_threads=1)
    tracemalloc.start()  # NumPy tells it of its arrays, torch and Arrow do not
    batches = iter(reader)
    next(batches)
    deadline_s = time.monotonic() + 20
    while True:  # a block that is being read holds more for a moment
        time.sleep(0.5)
        held_bytes, _ = tracemalloc.get_traced_memory()
        if held_bytes < 8 * MIB or time.monotonic() > deadline_s:
            break
    tracemalloc.stop()
    batches.close()  # type: ignore[attr-defined]
    assert held_bytes < 8 * MIB


@pytest.mark.slow
@pytest.mark.long
def test_a_batch_that_is_kept_does_not_hold_its_window(tmp_path: Path) -> None:
    num_rows = 2 * SLAB_BYTES // 16  # in one row group, so that a window is as large
    table = pa.table({"x": np.zeros(num_rows), "y": np.arange(num_rows)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=num_rows)
    for batch_size in (1000, 60_000, num_rows - 7):
        for shuffle in (True, False):
            for cache in (None, MemoryCache(1 << 30)):
                reader = ParquetReader(
                    tmp_path, batch_size=batch_size, shuffle=shuffle, cache=cache, remainder="partial"
                )
                (batch,) = itertools.islice(reader, 1)
                held = batch["x"].untyped_storage().nbytes() + batch["y"].untyped_storage().nbytes()
                assert held <= max(SLAB_BYTES, 2 * 16 * batch_size)
                rest = [batch["y"], *(one["y"] for one in reader)]
                assert torch.equal(torch.cat(rest).sort().values, torch.arange(num_rows))


def test_footers_of_many_files_are_kept_up_to_a_bound_and_the_last_one_always(tmp_path: Path) -> None:
    for number in range(6):
        pq.write_table(pa.table({"y": [number]}), tmp_path / f"{number}.parquet")
    paths = [str(tmp_path / f"{number}.parquet") for number in range(6)]
    read: list[str] = []

    def footer(footers: FooterCache, path: str) -> Any:
        def from_file() -> Any:
            read.append(path)
            return pq.read_metadata(path)

        return footers.get(path, from_file)

    size = memory_bytes(pq.read_metadata(paths[0]))
    footers = FooterCache(limit_bytes=3 * size)
    for path in [*paths[:3], paths[0], *paths[3:5]]:
        assert footer(footers, path).num_rows == 1
    assert read == paths[:5]
    assert footers.held_bytes == 3 * size
    for path in (paths[0], paths[3], paths[4], paths[1]):  # asked for again, it stayed longer than the others
        footer(footers, path)
    assert read == [*paths[:5], paths[1]]

    tiny = FooterCache(limit_bytes=1)
    for path in (paths[0], paths[0], paths[1], paths[1]):
        footer(tiny, path)
    assert read[6:] == paths[:2]
    assert tiny.held_bytes == size
