"""The share of a fit that two workers spend waiting for data: an MLP on 20 float columns and a label, read from Parquet
and shuffled. The time in `next()` is the wait; the same steps on batches that lie in memory already are the limit.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.report import Report
from hvd_cluster.launch import local

NUM_COLUMNS = 20
ROWS = 400_000
WORK = [(32, 400), (256, 400), (1024, 150)]


def write(path: Path) -> None:
    random = np.random.default_rng(0)
    columns = {f"f{index}": random.standard_normal(ROWS, dtype="f4") for index in range(NUM_COLUMNS)}
    pq.write_table(pa.table({**columns, "label": random.integers(0, 10, ROWS)}), path, row_group_size=16384)


def worker(path: str, batch_size: int, num_steps: int, turns: int) -> list[tuple[float, float, float]]:
    """(seconds of a pass, seconds of these in `next()`, seconds of as many steps on data in memory), turn by turn."""
    import torch

    import hvd_cluster.torch as hvd
    from hvd_cluster.data.reader import ParquetReader

    torch.set_num_threads(1)
    hvd.init()
    torch.manual_seed(0)
    hidden = [torch.nn.Linear(NUM_COLUMNS, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64), torch.nn.ReLU()]
    net = torch.nn.Sequential(*hidden, torch.nn.Linear(64, 10))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.01), net.named_parameters())
    names = [f"f{index}" for index in range(NUM_COLUMNS)]

    def step(batch: dict[str, torch.Tensor]) -> None:
        optimizer.zero_grad()
        features = torch.stack([batch[name] for name in names], dim=1)
        torch.nn.functional.cross_entropy(net(features), batch["label"]).backward()
        optimizer.step()

    reader = ParquetReader(path, batch_size=batch_size, rank=hvd.rank(), size=hvd.size())
    in_memory = list(itertools.islice(reader.epoch(0), num_steps))

    def from_memory() -> float:
        hvd.barrier()
        start_s = time.perf_counter()
        for batch in in_memory:
            step(batch)
        return time.perf_counter() - start_s

    def from_reader(epoch: int) -> tuple[float, float]:
        batches = reader.epoch(epoch)
        # The first batch comes when its window is decoded, once an epoch, however long that is.
        step(next(batches))
        hvd.barrier()
        start_s, wait_s = time.perf_counter(), 0.0
        for _ in range(num_steps):
            asked_s = time.perf_counter()
            batch = next(batches)
            wait_s += time.perf_counter() - asked_s
            step(batch)
        return time.perf_counter() - start_s, wait_s

    from_memory()
    found = [(*from_reader(turn), from_memory()) for turn in range(turns)]
    hvd.shutdown()
    return found


def measure(turns: int = 5) -> Report:
    """The wait of the slower worker, in percent of a pass."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.parquet"
        write(path)
        for batch_size, num_steps in WORK:
            run = functools.partial(worker, str(path), batch_size, num_steps, turns)
            ranks = local.run(run, num_proc=2, env={"OMP_NUM_THREADS": "1"})
            shares = sorted(max(rank[turn][1] / rank[turn][0] for rank in ranks) for turn in range(turns))
            per_step_ms = [
                statistics.median(rank[turn][column] for rank in ranks for turn in range(turns)) for column in (0, 2)
            ]
            rows.append(
                [
                    f"batches of {batch_size}",
                    *(f"{seconds / num_steps * 1e3:.2f} ms" for seconds in per_step_ms),
                    f"{statistics.median(shares):.1%} ({shares[0]:.1%} to {shares[-1]:.1%})",
                ]
            )
    columns = ["2 workers", "a step from Parquet", "a step from memory", "waiting for data"]
    return Report("Waiting for data in a fit of a small MLP", columns, rows)
