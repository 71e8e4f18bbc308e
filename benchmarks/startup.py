"""From the launcher's start to the first finished allreduce of 2 ranks: ``hvdrun`` against ``torchrun``, in turns."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.measure import Table, row

TURNS = 11

OURS = """\
import sys, time
import torch
import hvd_cluster.torch as hvd
hvd.init()
hvd.allreduce(torch.ones(4))
now = time.time()
open(f"{sys.argv[1]}/{hvd.rank()}", "w").write(str(now))
"""
PEER = """\
import sys, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(4))
now = time.time()
open(f"{sys.argv[1]}/{dist.get_rank()}", "w").write(str(now))
dist.destroy_process_group()
"""


def first_allreduce_s(launcher: list[str], script: str) -> float:
    """Seconds from the start of ``launcher`` until the slower rank has its first result."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "script.py")
        file.write_text(script)
        began_s = time.time()
        subprocess.run(
            [*launcher, str(file), folder], check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        return max(float(Path(folder, str(rank)).read_text()) for rank in range(2)) - began_s


def measure() -> Table:
    ours = [sys.executable, "-m", "hvd_cluster.launch.cli.main", "-np", "2", sys.executable]
    peer = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    times: dict[str, list[float]] = {"ours": [], "peer": []}
    for turn in range(TURNS + 1):
        for name, launcher, script in (("ours", ours, OURS), ("peer", peer, PEER)):
            taken_s = first_allreduce_s(launcher, script)
            if turn:  # the first turn warms the page cache
                times[name].append(taken_s)
    return Table("Start to the first allreduce, 2 ranks", "torchrun", [row("hvdrun -np 2", times)])
