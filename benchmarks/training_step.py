"""A training step: ours, DDP on Gloo, and no communication at all.

The MLP is 784-2048-2048-10, with batches of 64; the transformer has 8 layers of width 320, and batches of 4 sequences
of 64.

What a step must cost more is beside it: the same step with a barrier and no gradients (a step then takes as long as
that of the slower rank), and with a barrier and then the two passes over the gradients that it takes to reduce what
autograd allocates: each rank copies its own to where the other can read it, and adds the other's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.measure import Table, compare, row
from benchmarks.report import Reports
from hvd_cluster.launch import local

#: Elements of a piece that stays in the cache between the two passes.
PIECE = 1 << 18


def model_and_loss(what: str) -> tuple[Callable[[], torch.nn.Module], Callable[[torch.nn.Module], torch.Tensor]]:
    """Makes the model of a name, always with the same weights, and its loss on one batch."""

    def make() -> torch.nn.Module:
        torch.manual_seed(0)
        if what == "MLP":
            layers = [torch.nn.Linear(784, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 2048), torch.nn.ReLU()]
            return torch.nn.Sequential(*layers, torch.nn.Linear(2048, 10))
        layer = torch.nn.TransformerEncoderLayer(320, 8, 1280, dropout=0.0, batch_first=True)
        return torch.nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)

    x, y = torch.randn(64, 784), torch.randint(0, 10, (64,))
    if what != "MLP":
        x = torch.randn(4, 64, 320)

    def loss_of(model: torch.nn.Module) -> torch.Tensor:
        output = model(x)
        return torch.nn.functional.cross_entropy(output, y) if what == "MLP" else output.square().mean()

    return make, loss_of


def worker(what: str) -> dict[str, dict[str, list[float]]]:
    import torch.distributed as dist

    import hvd_cluster.torch as hvd

    hvd.init()
    dist.init_process_group("gloo")
    net, loss_of = model_and_loss(what)

    def step_of(
        model: torch.nn.Module, optimizer: torch.optim.Optimizer, between: Callable[[], object] = lambda: None
    ) -> Callable[[], None]:
        def step() -> None:
            optimizer.zero_grad()
            loss_of(model).backward()
            between()
            optimizer.step()

        return step

    one, mine, others = torch.ones(1), torch.zeros(PIECE), torch.zeros(PIECE)

    def barrier() -> None:
        hvd.allreduce_(one, op=hvd.Sum, name="barrier")

    def barrier_and_passes() -> None:
        barrier()
        for parameter in passing.parameters():
            assert parameter.grad is not None
            for piece in parameter.grad.view(-1).split(PIECE):
                mine[: piece.numel()].copy_(piece)
                torch.add(mine[: piece.numel()], others[: piece.numel()], out=piece)

    alone, waiting, passing, ours, peer = net(), net(), net(), net(), net()
    named = list(ours.named_parameters())
    our_step = step_of(ours, hvd.DistributedOptimizer(torch.optim.SGD(ours.parameters(), lr=0.01), named))
    ddp = torch.nn.parallel.DistributedDataParallel(peer)
    steps = {
        "DDP on Gloo": step_of(ddp, torch.optim.SGD(ddp.parameters(), lr=0.01)),
        "no communication (the limit)": step_of(alone, torch.optim.SGD(alone.parameters(), lr=0.01)),
        "a barrier alone": step_of(waiting, torch.optim.SGD(waiting.parameters(), lr=0.01), barrier),
        "a barrier and two passes": step_of(
            passing, torch.optim.SGD(passing.parameters(), lr=0.01), barrier_and_passes
        ),
    }
    found = {name: compare(our_step, step, turns=15, per_turn=3) for name, step in steps.items()}
    dist.destroy_process_group()
    hvd.shutdown()
    return found


def measure() -> Reports:
    tables = []
    titles = {
        "MLP": "A training step of an MLP of 5.8 million parameters",
        "transformer": "A training step of a transformer of 10 million parameters",
    }
    for what, title in titles.items():
        found = local.run(worker, (what,), num_proc=2, env={"OMP_NUM_THREADS": "1"})[0]
        rows = [row(f"2 ranks, against {name}", times) for name, times in found.items()]
        tables.append(Table(title, "the peer", rows))
    return Reports(tables)
