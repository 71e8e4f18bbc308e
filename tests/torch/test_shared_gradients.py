"""Gradients whose memory belongs to other tensors too: autograd makes them so where it can save a copy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from hvd_cluster.launch.local import Executor

OnRanks = Callable[..., list[Any]]


@pytest.fixture(scope="module", params=["shm", "gloo"])
def two(request: pytest.FixtureRequest) -> Iterator[OnRanks]:
    """Two ranks that send each gradient by itself, as soon as it is ready."""
    env = {
        "OMP_NUM_THREADS": "1",
        "HOROVOD_FUSION_THRESHOLD": "0",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "20",
        "HOROVOD_SHARED_MEMORY": str(int(request.param == "shm")),
    }

    def initialised(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        import hvd_cluster.torch as hvd

        hvd.init()
        return fn(hvd, *args)

    with Executor(2, env=env) as executor:
        yield lambda fn, *args: executor.run(initialised, (fn, args))


class Net(torch.nn.Module):
    """The gradient of ``pos`` has the memory of the one that the residual branch reads later, for batches of one row.

    The parts of a concatenation are its gradient's parts, and the gradients of ``x`` and ``y`` are one tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.block, self.head = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6), torch.nn.Linear(6, 1)
        self.pos, self.x, self.y = (torch.nn.Parameter(torch.randn(6)) for _ in range(3))
        self.q, self.k = (torch.nn.Parameter(torch.randn(3, 6)) for _ in range(2))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.first(rows)
        hidden = hidden + self.block(hidden)
        if hidden.requires_grad:
            hidden.register_hook(lambda _: time.sleep(0.05))  # what is sent by now is reduced before the branches go on
        hidden = hidden + self.pos.unsqueeze(0) + (self.x.unsqueeze(0) + self.y.unsqueeze(0)).tanh()
        return self.head(hidden * torch.cat([self.q, self.k]).pow(2).mean(0)).pow(2).sum()


def rows_of(rank: int, step: int) -> torch.Tensor:
    return torch.randn(1, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def local_gradients(rank: int, step: int) -> list[torch.Tensor]:
    net = Net()
    net(rows_of(rank, step)).backward()
    return [p.grad.clone() for p in net.parameters()]


@pytest.mark.parametrize("op", ["Sum", "Average"])
@pytest.mark.parametrize("is_set_to_none", [True, False])
def test_reductions_leave_what_the_backward_pass_still_reads(two: Any, op: str, is_set_to_none: bool) -> None:
    def fn(hvd: Any) -> list[list[torch.Tensor]]:
        net = Net()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), lr=0.0),
            net.named_parameters(),
            op=getattr(hvd, op),
        )
        found = []
        for step in range(4):
            optimizer.zero_grad(set_to_none=is_set_to_none)
            net(rows_of(hvd.rank(), step)).backward()
            optimizer.step()
            found.append([p.grad.clone() for p in net.parameters()])
        return found

    for found in two(fn):
        # Gradients that torch does not clear stay in one memory, and torch itself then adds both to it.
        for step, gradients in enumerate(found if is_set_to_none else found[:1]):
            for mine, *alone in zip(gradients, *(local_gradients(rank, step) for rank in range(2)), strict=True):
                torch.testing.assert_close(mine, sum(alone) / (2 if op == "Average" else 1))


def test_parts_of_a_concatenation_may_take_several_passes(two: Any) -> None:
    def fn(hvd: Any, passes: int) -> list[torch.Tensor]:
        parts = [torch.nn.Parameter(torch.full((40, 40), float(i))) for i in range(3)]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(parts, lr=0.1),
            [(f"part{i}", part) for i, part in enumerate(parts)],
            backward_passes_per_step=passes,
        )
        for step in range(3):
            optimizer.zero_grad(set_to_none=step == 0)
            for _ in range(passes):
                (torch.cat(parts) * (1 + hvd.rank() + step)).sum().backward()
            optimizer.step()
        return [part.detach() for part in parts]

    for passes in (1, 2):
        expected = 0.1 * passes * (1.5 + 2.5 + 3.5)
        for parts in two(fn, passes):
            for i, part in enumerate(parts):
                torch.testing.assert_close(part, torch.full((40, 40), i - expected))


@pytest.mark.parametrize("how", ["view", "data"])
def test_gradients_may_be_parts_of_a_buffer_of_the_user(two: Any, how: str) -> None:
    def fn(hvd: Any) -> list[torch.Tensor]:
        weights = [torch.nn.Parameter(torch.zeros(5)) for _ in range(4)]
        flat = torch.zeros(20)
        for i, weight in enumerate(weights):
            if how == "view":
                weight.grad = flat[5 * i : 5 * i + 5].view_as(weight)
            else:
                weight.grad = torch.zeros_like(weight)
                weight.grad.data = flat[5 * i : 5 * i + 5]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(weights, lr=1.0),
            [(f"w{i}", weight) for i, weight in enumerate(weights)],
        )
        found = []
        for step in range(3):
            flat.zero_()
            sum((weight * (i + hvd.rank() + step)).sum() for i, weight in enumerate(weights)).backward()
            found.append(flat.clone())
            optimizer.step()
        return found

    for found in two(fn):
        for step, flat in enumerate(found):
            torch.testing.assert_close(flat.view(4, 5), (torch.arange(4) + step + 0.5).unsqueeze(1).expand(4, 5))
