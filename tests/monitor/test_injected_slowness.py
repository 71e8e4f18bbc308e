"""Slow jobs of every kind: the monitor names the cause and, where there is one, the rank and its line."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.hosts import Hosts, missing
from hvd_cluster.launch import local

#: For more jobs: JOBS=100 SEED=1 pytest -m slow FILE
NUM_JOBS = int(os.environ.get("JOBS", "14"))
SEED = int(os.environ.get("SEED", "1"))
#: A wrong answer in more than this share of the jobs is an error.
MAX_WRONG = 0.05
NUM_STEPS = 20
#: What the monitor has to say of each: the activity, whether it is one rank, and part of the line.
EXPECTED: dict[str, tuple[set[str], bool, str]] = {
    "niced rank": ({"core"}, True, ""),
    "slow disk": ({"data"}, True, "read_slowly ("),
    "slow collation": ({"data"}, True, "collate_slowly ("),
    "rank 0 saves too often": ({"save"}, True, "save ("),
    "stragglers that move": ({"compute", "other"}, False, ""),
    "slow link": ({"transfer"}, False, ""),
    "slow loader on another host": ({"data"}, True, "collate_slowly ("),
}
ENV = {
    "OMP_NUM_THREADS": "1",
    "HOROVOD_MONITOR": "1",
    "HOROVOD_MONITOR_INTERVAL_SECONDS": "0.25",
}


def train(kind: str, victim: int, delay_s: float, folder: str) -> dict[str, Any] | None:
    """A rank of a slow job; rank 0 returns what its monitor says after 20 steps."""
    import time

    import hvd_cluster.torch as hvd
    from hvd_cluster.engine import current
    from hvd_cluster.monitor.step_clock import ACTIVITIES

    hvd.init()
    is_victim = hvd.rank() == victim
    width = 1200 if kind == "slow link" else 256
    model = torch.nn.Sequential(torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, 10))
    if kind == "slow link":
        model.append(torch.nn.Linear(10, 100_000))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
    disk, feeder = None, None
    if kind == "slow disk" and is_victim:
        script = f"while :; do head -c 64 /dev/zero; sleep {delay_s}; done"
        feeder = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, start_new_session=True)
        disk = feeder.stdout

    def read_slowly() -> None:
        assert disk is not None
        assert len(os.read(disk.fileno(), 64)) == 64

    class Rows(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 32 * (NUM_STEPS + 1)

        def __getitem__(self, index: int) -> torch.Tensor:
            if disk is not None and index % 32 == 0:
                read_slowly()
            return torch.full((64,), float(index % 7))

    def collate_slowly(rows: list[torch.Tensor]) -> torch.Tensor:
        end_s = time.perf_counter() + delay_s
        while time.perf_counter() < end_s:
            pass
        return torch.stack(rows)

    is_collation_slow = is_victim and kind in ("slow collation", "slow loader on another host")
    loader = torch.utils.data.DataLoader(Rows(), 32, collate_fn=collate_slowly if is_collation_slow else None)
    if kind == "niced rank":
        if is_victim:
            os.nice(10)
            with contextlib.suppress(OSError):  # where each session is scheduled as one group
                Path("/proc/self/autogroup").write_text("10")
        matrix = torch.randn(400, 400)
    for step, rows in enumerate(loader):
        optimizer.zero_grad()
        if kind == "niced rank":
            for _ in range(4):
                matrix @ matrix
        loss = model(rows).square().mean()
        if kind == "stragglers that move" and step % hvd.size() == hvd.rank():
            time.sleep(delay_s)
        loss.backward()
        optimizer.step()
        if kind == "rank 0 saves too often" and hvd.rank() == 0:
            torch.save([torch.zeros(int(delay_s * 5e7))], f"{folder}/checkpoint.pt")
    hvd.barrier()
    time.sleep(0.8)  # each rank reports its last steps
    if feeder is not None:
        os.killpg(feeder.pid, 9)
        feeder.wait()
        feeder.stdout.close()
    found = None
    if hvd.rank() == 0:
        job_monitor = current.engine().job_monitor
        job = None if job_monitor is None else job_monitor.steps()
        assert job is not None
        assert job.step <= NUM_STEPS
        first = job.bottlenecks[0] if job.bottlenecks else None
        found = {
            "cause": "" if first is None else "core" if first.is_starved else ACTIVITIES[first.activity],
            "rank": None if first is None else first.rank,
            "line": "" if first is None else first.call_site,
            "verdict": job.verdict,
        }
    hvd.barrier()
    hvd.shutdown()
    return found


@contextlib.contextmanager
def busy_cores() -> Iterator[None]:
    """Other processes use all cores."""
    loop = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(loop, start_new_session=True) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def run(kind: str, victim: int, delay_s: float, folder: Path) -> dict[str, Any]:
    """What rank 0 says of one slow job."""
    arguments = (kind, victim, delay_s, str(folder))
    if kind in ("slow link", "slow loader on another host"):
        with Hosts(2, rate_mbit=100 if kind == "slow link" else 1000) as hosts:
            return dict(hosts.run(train, arguments, ranks=[1, 1] if kind == "slow link" else [2, 1], env=ENV)[0])
    with busy_cores() if kind == "niced rank" else contextlib.nullcontext():
        return dict(local.run(train, arguments, num_proc=3, env=ENV)[0])


@pytest.mark.slow
@pytest.mark.timeout(NUM_JOBS * 60 + 60)
def test_the_cause_of_each_slow_job_is_named_within_20_steps(tmp_path: Path) -> None:
    kinds = [kind for kind in EXPECTED if not (missing() and kind in ("slow link", "slow loader on another host"))]
    choose = random.Random(SEED)
    wrong: list[str] = []
    right: Counter[str] = Counter()
    for number in range(NUM_JOBS):
        kind = kinds[number % len(kinds)]
        victim = {"rank 0 saves too often": 0, "slow loader on another host": 2}.get(kind, choose.randrange(3))
        found = run(kind, victim, choose.choice([0.03, 0.05, 0.08]), tmp_path)
        causes, is_one_rank, line = EXPECTED[kind]
        is_right = found["cause"] in causes and found["rank"] == (victim if is_one_rank else None)
        if is_right and line in found["line"]:
            right[kind] += 1
        else:
            wrong.append(f"{kind}, rank {victim}: {found['verdict'] or 'nothing'}")
        print(f"{number + 1}: {kind}, rank {victim}: {found['verdict']}")
    print(dict(right))
    assert len(wrong) <= MAX_WRONG * NUM_JOBS, "\n".join(wrong)
