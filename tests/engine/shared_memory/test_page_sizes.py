"""The layout of shared memory for pages of 64 KiB, as kernels for Arm may have them, on a kernel with smaller ones."""

from __future__ import annotations

import os
import re
import subprocess
import sys

PAGE_BYTES = 1 << 16
SCRIPT = f"""
import mmap
mmap.PAGESIZE = {PAGE_BYTES}
import torch, hvd_cluster.torch as hvd
hvd.init()
tensors = [hvd.shared_empty(50_000) for _ in range(3)]
first = tensors[0].data_ptr()
assert all((tensor.data_ptr() - first) % mmap.PAGESIZE == 0 for tensor in tensors)
for tensor in tensors:
    hvd.allreduce_(tensor.fill_(hvd.rank() + 1.0), op=hvd.Sum)
assert all(bool((tensor == 3).all()) for tensor in tensors)
print("sum is 3;")
"""


def test_tensors_begin_at_pages_of_64_kib() -> None:
    line = [sys.executable, "-m", "hvd_cluster.launch.cli.main", "-np", "2", sys.executable, "-c", SCRIPT]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    assert re.findall("sum is 3;", done.stdout) == ["sum is 3;"] * 2
