"""Rows per second of whole training steps, all ranks together: `TorchEstimator` reading Parquet, our optimizer over
batches in memory, and DDP over the same batches; the same rows, net and batch size, in turns, each with two workers. A
turn is a fit, or a loop of as many steps; its first epoch does not count. Two of the fits have a metric, or a cache of
the decoded rows. Below, the same beside two processes that compute without end.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from benchmarks.report import Report, Reports
from hvd_cluster.estimators import LocalBackend, TorchEstimator
from hvd_cluster.launch import local

TURNS = 3
ROWS = 400_000
FEATURES = 20
CLASSES = 10
BATCH_SIZE = 1024
EPOCHS = 4
ENV = {"OMP_NUM_THREADS": "1"}


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    hidden = [torch.nn.Linear(FEATURES, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64), torch.nn.ReLU()]
    return torch.nn.Sequential(*hidden, torch.nn.Linear(64, CLASSES))


def write(path: Path) -> None:
    random = np.random.default_rng(0)
    numbers = pa.array(random.standard_normal(ROWS * FEATURES, dtype="f4"))
    table = pa.table(
        {"x": pa.FixedSizeListArray.from_arrays(numbers, FEATURES), "y": random.integers(0, CLASSES, ROWS)}
    )
    pq.write_table(table, path, row_group_size=16_384)


def loop(path: str, is_ours: bool) -> float:
    """Rows per second of this rank's steps over batches that lie in memory."""
    import torch.distributed as dist

    import hvd_cluster.torch as hvd
    from hvd_cluster.data.reader import ParquetReader

    hvd.init()
    torch.set_num_threads(1)
    model: torch.nn.Module = net()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    if is_ours:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    else:
        dist.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(model)
    batches = list(ParquetReader(path, batch_size=BATCH_SIZE, rank=hvd.rank(), size=hvd.size()))

    def epoch() -> None:
        for batch in batches:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"]).backward()
            optimizer.step()

    epoch()
    hvd.barrier()
    began_s = time.perf_counter()
    for _ in range(EPOCHS - 1):
        epoch()
    taken_s = time.perf_counter() - began_s
    if not is_ours:
        dist.destroy_process_group()
    hvd.shutdown()
    return len(batches) * BATCH_SIZE * (EPOCHS - 1) / taken_s


def accuracy(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return (output.argmax(dim=1) == label).float().mean()


def fit(path: str, **params: Any) -> float:
    """Rows per second of the median of the epochs that count, both ranks together."""
    model = net()
    fitted = TorchEstimator(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        loss=torch.nn.functional.cross_entropy,
        feature_cols=["x"],
        label_cols=["y"],
        batch_size=BATCH_SIZE,
        epochs=EPOCHS,
        backend=LocalBackend(2, env=ENV, verbose=0),
        verbose=0,
        **params,
    ).fit(path)
    return statistics.median(sum(record["samples_per_s"]) for record in fitted.getHistory()[1:])


def contenders(path: str) -> dict[str, Callable[[], float]]:
    def looped(is_ours: bool) -> float:
        return sum(local.run(loop, (path, is_ours), num_proc=2, env=ENV, verbose=0))

    return {
        "DDP on Gloo, rows in memory": lambda: looped(False),
        "ours, rows in memory": lambda: looped(True),
        "TorchEstimator, Parquet": lambda: fit(path),
        "the same with a metric": lambda: fit(path, metrics=[accuracy]),
        "the same with inmemory_cache_all": lambda: fit(path, inmemory_cache_all=True),
    }


def rates(path: str) -> dict[str, list[float]]:
    """Of each contender, turn by turn."""
    found: dict[str, list[float]] = {name: [] for name in contenders(path)}
    for _ in range(TURNS):
        for name, contender in contenders(path).items():
            found[name].append(contender())
    return found


def _compute_without_end() -> None:
    while True:
        sum(range(10_000))


@contextlib.contextmanager
def busy(num_processes: int) -> Iterator[None]:
    """That many processes that compute."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_compute_without_end, daemon=True) for _ in range(num_processes)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def table(title: str, found: dict[str, list[float]]) -> Report:
    first = next(iter(found.values()))
    rows = []
    for name, measured in found.items():
        ratios = sorted(one / other for one, other in zip(measured, first, strict=True))
        shown = f"{statistics.median(ratios):.2f}x ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        rows.append([name, f"{statistics.median(measured):,.0f}", shown])
    return Report(title, ["contender", "rows/s", "to DDP (all turns)"], rows)


def measure() -> Reports:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.parquet")
        write(path)
        alone = rates(str(path))
        with busy(2):
            loaded = rates(str(path))
    title = f"Training on {ROWS:,} rows of {FEATURES} numbers, batches of {BATCH_SIZE}"
    return Reports([table(title, alone), table(f"{title}, beside two busy processes", loaded)])
