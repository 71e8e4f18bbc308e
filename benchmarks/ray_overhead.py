"""Two workers on Ray: ``RayExecutor`` against Ray Train's ``TorchTrainer`` with DDP on Gloo, in turns in one session.

The start is from the call to the first finished allreduce on the slower worker, with fresh processes each time; the
step is one of the MLP 784-2048-2048-10 with batch 64, as in ``training_step``.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.measure import Table, row

TURNS = 5
STEPS = 60
WARM_UP_STEPS = 10


def training(model: Any, optimizer: Any) -> float:
    """Median seconds of a step."""
    import torch

    x, y = torch.randn(64, 784), torch.randint(0, 10, (64,))
    seconds = []
    for _ in range(STEPS):
        began_s = time.perf_counter()
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - began_s)
    return statistics.median(seconds[WARM_UP_STEPS:])


def net() -> Any:
    import torch

    torch.manual_seed(0)
    layers = [torch.nn.Linear(784, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 2048), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(2048, 10))


def our_worker(folder: str) -> None:
    import torch

    import hvd_cluster.torch as hvd

    hvd.init()
    hvd.allreduce(torch.ones(4))
    now_s = time.time()
    model = net()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
    Path(folder, str(hvd.rank())).write_text(json.dumps([now_s, training(model, optimizer)]))


def peer_worker(config: dict[str, str]) -> None:
    import ray.train.torch
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(4))
    now_s = time.time()
    model = ray.train.torch.prepare_model(net())
    step_s = training(model, torch.optim.SGD(model.parameters(), lr=0.01))
    Path(config["folder"], str(dist.get_rank())).write_text(json.dumps([now_s, step_s]))


def ours(folder: str) -> None:
    from hvd_cluster.ray import RayExecutor

    with RayExecutor(RayExecutor.create_settings(timeout_s=120), num_workers=2) as executor:
        executor.run(our_worker, args=[folder])


def peer(folder: str) -> None:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    TorchTrainer(
        peer_worker,
        train_loop_config={"folder": folder},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=folder, name="run"),
    ).fit()


def measured(contender: Callable[[str], None]) -> tuple[float, float]:
    """Seconds to the first allreduce, and of a step."""
    with tempfile.TemporaryDirectory() as folder:
        began_s = time.time()
        contender(folder)
        found = [json.loads(Path(folder, str(rank)).read_text()) for rank in range(2)]
    return max(first_s for first_s, _ in found) - began_s, max(step_s for _, step_s in found)


def measure() -> Table:
    with tempfile.TemporaryDirectory(prefix="hvdr", dir="/tmp") as folder:
        os.environ["RAY_TMPDIR"] = folder  # short, since sockets lie in it
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # no token in the user's home
        import ray

        # A CPU more than there are workers: Ray Train's controller takes none, but its start may.
        ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        try:
            starts: dict[str, list[float]] = {"ours": [], "peer": []}
            steps: dict[str, list[float]] = {"ours": [], "peer": []}
            for turn in range(TURNS + 1):
                for name, contender in (("ours", ours), ("peer", peer)):
                    start_s, step_s = measured(contender)
                    if turn:  # the first turn warms the page cache, and Ray
                        starts[name].append(start_s)
                        steps[name].append(step_s)
        finally:
            ray.shutdown()
    rows = [row("start to the first allreduce", starts), row("a training step", steps)]
    return Table("Two workers on Ray", "TorchTrainer with DDP", rows)
