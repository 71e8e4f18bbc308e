"""Loops with the optimizers of torch, over the backend "hvd": each update is a step, and waits for ranks are waits."""

from __future__ import annotations

import sys
from typing import Any

import cloudpickle
import pytest

cloudpickle.register_pickle_by_value(sys.modules[__name__])

BATCHES = 8


def measured(dist: Any, gloo: Any, loop: Any) -> tuple[int, str]:
    """Number of steps, and the largest activity, of a loop in which rank 1 waits before the forward pass."""
    import time

    import torch

    import hvd_cluster.torch as hvd
    from hvd_cluster.monitor.step_clock import ACTIVITIES, step_clock

    def inputs() -> Any:
        time.sleep(0.04 * dist.get_rank())
        return torch.ones(4, 16)

    torch.manual_seed(0)
    net = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(3)])
    step_clock.restart()
    loop(net, inputs)
    sums = [sum(column) for column in zip(*hvd.step_times(), strict=True)]
    return step_clock.num_steps, ACTIVITIES[sums.index(max(sums))]


def train(model: Any, optimizer: Any, inputs: Any) -> None:
    for _ in range(BATCHES):
        optimizer.zero_grad()
        model(inputs()).sum().backward()
        optimizer.step()


def sgd(model: Any) -> Any:
    import torch

    return torch.optim.SGD(model.parameters(), lr=0.01)


def ddp(net: Any, inputs: Any) -> None:
    import torch

    model = torch.nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.001)
    train(model, sgd(model), inputs)


def ddp_with_hook(net: Any, inputs: Any) -> None:
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    model = torch.nn.parallel.DistributedDataParallel(net)
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    train(model, sgd(model), inputs)


def sharded(net: Any, inputs: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    for layer in net:
        fully_shard(layer)
    fully_shard(net)
    train(net, sgd(net), inputs)


def with_closure(net: Any, inputs: Any) -> None:
    import torch

    model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(inputs()).square().sum()
        loss.backward()
        return loss

    for _ in range(BATCHES):
        optimizer.step(closure)


def in_parts(net: Any, inputs: Any) -> None:
    """An optimizer that calls another one."""
    import torch
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = torch.nn.parallel.DistributedDataParallel(net)
    train(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.01), inputs)


def distributed_optimizer(net: Any, inputs: Any) -> None:
    import hvd_cluster.torch as hvd

    train(net, hvd.DistributedOptimizer(sgd(net), net.named_parameters()), inputs)


def after_an_error(net: Any, inputs: Any) -> None:
    import torch

    model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = sgd(model)

    def closure() -> Any:
        raise KeyError("in the forward pass")

    with pytest.raises(KeyError):
        optimizer.step(closure)
    train(model, optimizer, inputs)


@pytest.mark.parametrize(
    "loop", [ddp, ddp_with_hook, sharded, with_closure, in_parts, distributed_optimizer, after_an_error]
)
def test_each_update_is_one_step_and_the_others_wait_for_the_late_rank(pair: Any, loop: Any) -> None:
    assert pair(measured, loop) == [(BATCHES, "late"), (BATCHES, "compute")]


def of_a_gan(net: Any, inputs: Any) -> None:
    import torch

    models = [torch.nn.parallel.DistributedDataParallel(layer) for layer in net[:2]]
    optimizers = [sgd(model) for model in models]
    for _ in range(BATCHES):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(inputs()).sum().backward()
            optimizer.step()


def test_each_of_two_optimizers_has_its_own_steps(pair: Any) -> None:
    assert pair(measured, of_a_gan) == [(2 * BATCHES, "late"), (2 * BATCHES, "compute")]


def test_without_the_group_the_steps_of_other_optimizers_do_not_count(pair: Any) -> None:
    def fn(dist: Any, gloo: Any) -> tuple[int, int]:
        import torch
        from torch.optim import optimizer as module

        from hvd_cluster.monitor.step_clock import step_clock
        from hvd_cluster.torch.distributed import updates

        def counted() -> int:
            before = step_clock.num_steps
            sgd(torch.nn.Linear(1, 1)).step()
            return step_clock.num_steps - before

        with_group = counted()
        updates.ignore_updates()  # as the end of the group does, which the workers of other tests still need
        without = counted()
        hooks = [*module._global_optimizer_pre_hooks, *module._global_optimizer_post_hooks]
        updates.count_updates()
        assert not hooks
        return with_group, without

    assert pair(fn) == [(1, 0), (1, 0)]
