"""The share of a fit that two workers spend waiting for data: an MLP on 20 float columns and a label, read from Parquet
and shuffled, in whole epochs one after the other: the first batches count. The time in `next()` is the wait, from the
moment at which the first epoch is asked for; the same steps on batches that lie in memory already are the limit.
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
#: Batch size, and epochs of a fit: about as many seconds each.
WORK = [(32, 1), (256, 5), (1024, 10)]


def write(path: Path) -> None:
    random = np.random.default_rng(0)
    columns = {f"f{index}": random.standard_normal(ROWS, dtype="f4") for index in range(NUM_COLUMNS)}
    pq.write_table(pa.table({**columns, "label": random.integers(0, 10, ROWS)}), path, row_group_size=16384)


def worker(path: str, batch_size: int, num_epochs: int, turns: int) -> list[tuple[float, float, float, float]]:
    """Seconds of a fit, of these in `next()`, of the longest wait at an epoch's beginning but the first's, and of as
    many steps on data in memory; turn by turn."""
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

    def new_reader() -> ParquetReader:
        return ParquetReader(path, batch_size=batch_size, rank=hvd.rank(), size=hvd.size(), num_epochs=num_epochs)

    in_memory = list(itertools.islice(new_reader(), 100))
    num_steps = new_reader().steps * num_epochs

    def from_memory() -> float:
        hvd.barrier()
        start_s = time.perf_counter()
        for batch in itertools.islice(itertools.cycle(in_memory), num_steps):
            step(batch)
        return time.perf_counter() - start_s

    def from_reader() -> tuple[float, float, float]:
        reader = new_reader()
        hvd.barrier()
        start_s, wait_s, longest_s = time.perf_counter(), 0.0, 0.0
        for epoch in range(num_epochs):
            batches = iter(reader)
            first = True
            while True:
                asked_s = time.perf_counter()
                batch = next(batches, None)
                waited_s = time.perf_counter() - asked_s
                wait_s += waited_s
                if first and epoch:
                    longest_s = max(longest_s, waited_s)
                first = False
                if batch is None:
                    break
                step(batch)
        return time.perf_counter() - start_s, wait_s, longest_s

    from_memory()
    found = [(*from_reader(), from_memory()) for _ in range(turns)]
    hvd.shutdown()
    return found


def measure(turns: int = 5) -> Report:
    """The wait of the slower worker, in percent of a fit."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.parquet"
        write(path)
        for batch_size, num_epochs in WORK:
            run = functools.partial(worker, str(path), batch_size, num_epochs, turns)
            ranks = local.run(run, num_proc=2, env={"OMP_NUM_THREADS": "1"})
            shares = sorted(max(rank[turn][1] / rank[turn][0] for rank in ranks) for turn in range(turns))
            whole, first, memory = (
                statistics.median(rank[turn][column] for rank in ranks for turn in range(turns)) for column in (0, 2, 3)
            )
            num_steps = ROWS // (2 * batch_size) * num_epochs
            rows.append(
                [
                    f"batches of {batch_size}, {num_epochs} epoch{'s' if num_epochs > 1 else ''}",
                    *(f"{seconds / num_steps * 1e3:.2f} ms" for seconds in (whole, memory)),
                    f"{first * 1e3:.1f} ms" if num_epochs > 1 else "-",
                    f"{statistics.median(shares):.1%} ({shares[0]:.1%} to {shares[-1]:.1%})",
                ]
            )
    columns = ["2 workers", "a step from Parquet", "a step from memory", "first batch of a later epoch", "waiting"]
    return Report("Waiting for data in a fit of a small MLP", columns, rows)
