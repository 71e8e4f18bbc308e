"""A training step of an MLP (784-2048-2048-10, batch 64): ours, DDP on Gloo, and no communication at all."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.measure import Row, Table, compare, row
from hvd_cluster.launch import local


def worker() -> dict[str, dict[str, list[float]]]:
    import torch
    import torch.distributed as dist

    import hvd_cluster.torch as hvd

    hvd.init()
    dist.init_process_group("gloo")

    def net() -> torch.nn.Module:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(784, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 2048), torch.nn.ReLU()]
        return torch.nn.Sequential(*layers, torch.nn.Linear(2048, 10))

    x, y = torch.randn(64, 784), torch.randint(0, 10, (64,))

    def step_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        def step() -> None:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

        return step

    alone, ours, peer = net(), net(), net()
    named = list(ours.named_parameters())
    our_step = step_of(ours, hvd.DistributedOptimizer(torch.optim.SGD(ours.parameters(), lr=0.01), named))
    ddp = torch.nn.parallel.DistributedDataParallel(peer)
    steps = {
        "DDP on Gloo": step_of(ddp, torch.optim.SGD(ddp.parameters(), lr=0.01)),
        "no communication (the limit)": step_of(alone, torch.optim.SGD(alone.parameters(), lr=0.01)),
    }
    found = {name: compare(our_step, step, turns=15, per_turn=3) for name, step in steps.items()}
    dist.destroy_process_group()
    hvd.shutdown()
    return found


def measure() -> Table:
    found = local.run(worker, num_proc=2, env={"OMP_NUM_THREADS": "1"})[0]
    rows: list[Row] = [row(f"2 ranks, against {name}", times) for name, times in found.items()]
    return Table("A training step of an MLP of 5.8 million parameters", "the peer", rows)
