"""Jobs of three ranks that are slow on purpose, for seven causes: what the monitor says of each after 20 steps, and
whether it names the cause, and the rank and its line where there is one. Rank and delay (0.03 to 0.08 s) are random.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.hosts import Hosts, missing
from benchmarks.report import Report
from hvd_cluster.launch import local

NUM_JOBS = 100
SEED = 1
NUM_STEPS = 20
#: Bytes that the slow disk gives at once: the smallest size of a pipe.
CHUNK = 4096
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
        script = f"while :; do head -c {CHUNK} /dev/zero; sleep {delay_s}; done"
        # The pipe holds one chunk: a larger one would fill up while the job begins, and then serve it at once.
        feeder = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, start_new_session=True, pipesize=CHUNK)
        disk = feeder.stdout

    def read_slowly() -> None:
        assert disk is not None
        assert len(os.read(disk.fileno(), CHUNK)) == CHUNK

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
    if feeder is not None and disk is not None:
        os.killpg(feeder.pid, 9)
        feeder.wait()
        disk.close()
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


@dataclass(frozen=True)
class Job:
    """A slow job, and what the monitor has said of it."""

    kind: str
    victim: int
    verdict: str
    #: Whether the verdict names the cause, and the rank and its line where there is one.
    is_right: bool


def jobs(number: int, seed: int = SEED) -> Iterator[Job]:
    """Run ``number`` slow jobs, one after the other; those that need hosts only where hosts can be made."""
    kinds = [kind for kind in EXPECTED if not (missing() and kind in ("slow link", "slow loader on another host"))]
    choose = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        for index in range(number):
            kind = kinds[index % len(kinds)]
            victim = {"rank 0 saves too often": 0, "slow loader on another host": 2}.get(kind, choose.randrange(3))
            found = run(kind, victim, choose.choice([0.03, 0.05, 0.08]), folder)
            causes, is_one_rank, line = EXPECTED[kind]
            is_cause = found["cause"] in causes and found["rank"] == (victim if is_one_rank else None)
            yield Job(kind, victim, found["verdict"], is_cause and line in found["line"])


def run(kind: str, victim: int, delay_s: float, folder: str) -> dict[str, Any]:
    """What rank 0 says of one slow job."""
    arguments = (kind, victim, delay_s, folder)
    if kind in ("slow link", "slow loader on another host"):
        with Hosts(2, rate_mbit=100 if kind == "slow link" else 1000) as hosts:
            return dict(hosts.run(train, arguments, ranks=[1, 1] if kind == "slow link" else [2, 1], env=ENV)[0])
    with busy_cores() if kind == "niced rank" else contextlib.nullcontext():
        return dict(local.run(train, arguments, num_proc=3, env=ENV)[0])


def measure() -> Report:
    found = list(jobs(NUM_JOBS))
    rows = []
    for kind in EXPECTED:
        own = [job for job in found if job.kind == kind]
        if own:
            rows.append((kind, f"{sum(job.is_right for job in own)} of {len(own)}", own[0].verdict))
    wrong = [f"Wrong: {job.kind}, rank {job.victim}: {job.verdict or 'nothing'}" for job in found if not job.is_right]
    title = f"The cause of {sum(job.is_right for job in found)} of {len(found)} slow jobs is named"
    return Report(title, ["cause", "named", "what the monitor said of the first"], rows, wrong)
