"""``torch.compile`` around what talks to the other ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hvd_cluster.launch.local import run

ENV = {"OMP_NUM_THREADS": "1"}


def collective_first() -> list[Any]:
    import hvd_cluster.torch as hvd

    hvd.init()

    @torch.compile(backend="eager")
    def doubled_sum(x: torch.Tensor) -> torch.Tensor:
        return hvd.allreduce(x * 2, op=hvd.Sum) + 1

    x = torch.ones(3, requires_grad=True)
    doubled_sum(x).sum().backward()
    assert x.grad is not None
    return [doubled_sum(torch.ones(2 + i)).tolist() for i in range(3)] + [x.grad.tolist()]


@pytest.mark.slow  # loads the compiler
def test_a_compiled_function_may_call_a_collective_before_anything_else() -> None:
    assert run(collective_first, num_proc=2, env=ENV) == [[[5.0] * 2, [5.0] * 3, [5.0] * 4, [4.0] * 3]] * 2


def compiled_steps(is_compiled: bool) -> list[float]:
    import hvd_cluster.torch as hvd

    hvd.init()
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 3), hvd.SyncBatchNorm(3), torch.nn.Linear(3, 1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.01), net.named_parameters())

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        net(x).square().sum().backward()
        optimizer.step()

    if is_compiled:
        step = torch.compile(step, backend="aot_eager")
    for number in range(4):  # of varying length, which Dynamo makes symbolic
        rows = 4 + 2 * number
        step(torch.randn(rows, 4, generator=torch.Generator().manual_seed(10 * number + hvd.rank())))
    return torch.cat([p.detach().flatten() for p in net.parameters()]).tolist()


@pytest.mark.slow
def test_a_compiled_training_step_gives_the_weights_of_an_uncompiled_one() -> None:
    (first, second), (plain, _) = (run(compiled_steps, (flag,), num_proc=2, env=ENV) for flag in (True, False))
    assert first == second
    assert first == pytest.approx(plain, rel=1e-4, abs=1e-6)
