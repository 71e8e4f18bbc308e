"""The memory that a reader takes stays below the bound that it states, however large the data is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hvd_cluster.data.reader import ParquetReader

#: Reads an epoch and tells how far the process has grown beyond what it was after a few batches of other data.
SCRIPT = """
import json, re, sys
import torch
from hvd_cluster.data.reader import ParquetReader

def kib(name):
    return int(re.search(rf"{name}:\\s+(\\d+) kB", open("/proc/self/status").read())[1])

torch.set_num_threads(1)
small, large, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
for _ in ParquetReader(small, **options):
    pass
reader = ParquetReader(large, **options)
before = kib("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # the peak counts from here
rows = sum(len(batch["x"]) for batch in reader)
print(json.dumps({"rows": rows, "grown": (kib("VmHWM") - before) * 1024, "bound": reader.memory_bytes}))
"""

MIB = 1 << 20


def write(path: Path, num_bytes: int) -> int:
    """Rows of 64 bytes, whose file is small; returns their number."""
    group = pa.table({"x": pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(16 * 8192, dtype="f4")), 16)})
    groups = num_bytes // (8192 * 64)
    with pq.ParquetWriter(path, group.schema) as writer:
        for _ in range(groups):
            writer.write_table(group)
    return groups * 8192


def test_a_data_set_of_twenty_times_the_bound_is_read_below_the_bound(tmp_path: Path) -> None:
    options = {"batch_size": 1024, "prefetch_bytes": 12 * MIB, "window_bytes": 2 * MIB}
    write(tmp_path / "small.parquet", 16 * MIB)
    bound = ParquetReader(tmp_path / "small.parquet", **options).memory_bytes
    assert bound <= 40 * MIB
    rows = write(tmp_path / "large.parquet", 20 * bound)
    paths = [str(tmp_path / "small.parquet"), str(tmp_path / "large.parquet")]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *paths, json.dumps(options)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["rows"] == rows
    assert found["bound"] == bound
    assert found["grown"] <= bound
