"""What the user's code finds and may do between ``backward()`` and ``step()``: the same as with torch's own DDP."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hvd_cluster.errors import WorkerFailedError
from hvd_cluster.launch import local

Change = Callable[[torch.nn.Module, int], None]


def clip_norm(net: torch.nn.Module, step: int) -> None:
    torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05)


def clip_norm_of_each(net: torch.nn.Module, step: int) -> None:
    torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05, foreach=False)


def clip_value(net: torch.nn.Module, step: int) -> None:
    torch.nn.utils.clip_grad_value_(net.parameters(), 0.01)


def add_noise(net: torch.nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for p in net.parameters():
        p.grad.add_(torch.randn(p.shape, generator=generator), alpha=0.01)


def add_l2(net: torch.nn.Module, step: int) -> None:
    for p in net.parameters():
        p.grad.add_(p.detach(), alpha=0.1)


def scale(net: torch.nn.Module, step: int) -> None:
    torch._foreach_mul_([p.grad for p in net.parameters()], 0.5)


def replace(net: torch.nn.Module, step: int) -> None:
    for p in net.parameters():
        p.grad = p.grad.sign() * 0.01


CHANGES: list[Change] = [clip_norm, clip_norm_of_each, clip_value, add_noise, add_l2, scale, replace]


def weights(net: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def train(net: Any, optimizer: Any, change: Change, rank: int, steps: int, late: bool) -> torch.Tensor:
    pauses = random.Random(7)
    for step in range(steps):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        x, y = (torch.randn(4, n, generator=generator).to(weights(net).dtype) for n in (8, 2))
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(net(x), y).backward()
        slow, pause_s = pauses.randrange(3), pauses.uniform(0, 0.05)
        if late and rank == slow:
            time.sleep(pause_s)
        change(net, step)
        optimizer.step()
    return weights(net)


def make_net(width: int = 16, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Tanh(), torch.nn.Linear(width, 2)).to(dtype)


def against_ddp(
    hvd: Any, change: Change, steps: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights of this rank after training with ours, and with DistributedDataParallel."""
    import torch.distributed as dist

    net = make_net(dtype=dtype)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), net.named_parameters()
    )
    ours = train(net, optimizer, change, hvd.rank(), steps, late=True)
    dist.init_process_group("gloo")
    try:
        peer = train_with_ddp(change, hvd.rank(), steps, dtype)
    finally:
        dist.destroy_process_group()
    return ours, peer


def train_with_ddp(change: Change, rank: int, steps: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    ddp = torch.nn.parallel.DistributedDataParallel(make_net(dtype=dtype))
    return train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9), change, rank, steps, late=False)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_gradients_changed_between_backward_and_step_are_those_of_ddp(three: Any, change: Change) -> None:
    results = three(against_ddp, change, 20)
    for ours, peer in results:
        assert torch.equal(ours, results[0][0])
        torch.testing.assert_close(ours, peer, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_two_hundred_steps_with_a_late_rank_are_those_of_ddp(three: Any, change: Change) -> None:
    # In float64: with noise, this training amplifies rounding 10,000 times, and DDP adds up in another order.
    results = three(against_ddp, change, 200, torch.float64)
    for ours, peer in results:
        assert torch.equal(ours, results[0][0])
        torch.testing.assert_close(ours, peer, rtol=1e-9, atol=1e-9)


def scalars(count: int, value: float = 1.0) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.full((2,), value)) for _ in range(count)]


def wrap(hvd: Any, parameters: list[torch.nn.Parameter], lr: float = 1.0, **options: Any) -> Any:
    named = [(f"p{i}", parameter) for i, parameter in enumerate(parameters)]
    return hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=lr), named, **options)


def test_gradients_are_reduced_when_backward_returns(two: Any) -> None:
    def fn(hvd: Any) -> list[list[float]]:
        parameters = scalars(3)
        optimizer = wrap(hvd, parameters)
        seen = []
        for _ in range(3):
            optimizer.zero_grad()
            sum(p.sum() * (hvd.rank() + 1) for p in parameters).backward()
            seen.append([p.grad[0].item() for p in parameters])
            optimizer.step()
        return seen

    assert two(fn) == [[[1.5] * 3] * 3] * 2


def test_sparse_gradients_are_reduced_when_backward_returns(two: Any) -> None:
    def fn(hvd: Any) -> list[list[float]]:
        table = torch.nn.Embedding(4, 1, sparse=True)
        optimizer = wrap(hvd, [table.weight])
        seen = []
        for _ in range(3):
            optimizer.zero_grad()
            table(torch.tensor([hvd.rank(), 3])).sum().backward()
            seen.append(table.weight.grad.to_dense().flatten().tolist())
            table.weight.grad.mul_(0.5)
            optimizer.step()
        return seen

    assert two(fn) == [[[0.5, 0.5, 0.0, 1.0]] * 3] * 2


def test_each_of_several_passes_reduces_what_no_later_pass_reaches(two: Any) -> None:
    """The first step shows which pass is the last one for a parameter; clipping in between is the same on all ranks."""

    def fn(hvd: Any) -> list[float]:
        first, second = parameters = scalars(2)
        optimizer = wrap(hvd, parameters)
        seen: list[float] = []
        for _ in range(3):
            optimizer.zero_grad()
            (first.sum() * (hvd.rank() + 1)).backward()
            seen.append(first.grad[0].item())
            torch.nn.utils.clip_grad_value_([first], 1.0)
            (second.sum() * (hvd.rank() + 1)).backward()
            seen.append(second.grad[0].item())
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
        return [*seen, first[0].item(), second[0].item()]

    first, second = two(fn)
    assert first == second
    assert first[:6] == [1.5] * 6


def test_the_last_of_several_passes_reduces_what_has_had_fewer(two: Any) -> None:
    """A trunk that two losses share, and a head for each of them."""

    def fn(hvd: Any) -> list[list[float]]:
        trunk, head, other = parameters = scalars(3)
        optimizer = wrap(hvd, parameters, backward_passes_per_step=2)
        seen = []
        for step in range(3):
            optimizer.zero_grad()
            ((trunk + head).sum() * (hvd.rank() + 1)).backward()
            ((trunk + other).sum() * (hvd.rank() + 1)).backward()
            if step:
                torch.nn.utils.clip_grad_norm_(parameters, 100.0)
                seen.append([p.grad[0].item() for p in parameters])
            optimizer.step()
        return seen

    assert two(fn) == [[[3.0, 1.5, 1.5]] * 2] * 2


def test_accumulated_gradients_are_reduced_by_the_last_pass(two: Any) -> None:
    def fn(hvd: Any) -> list[list[float]]:
        parameters = scalars(2)
        optimizer = wrap(hvd, parameters, backward_passes_per_step=2)
        seen = []
        for _ in range(2):
            optimizer.zero_grad()
            for _ in range(2):
                sum(p.sum() * (hvd.rank() + 1) for p in parameters).backward()
                seen.append([p.grad[0].item() for p in parameters])
            torch.nn.utils.clip_grad_norm_(parameters, 0.5)
            optimizer.step()
        return seen

    first, second = two(fn)
    assert first == [[1.0, 1.0], [3.0, 3.0]] * 2
    assert second == [[2.0, 2.0], [3.0, 3.0]] * 2


def test_parts_that_ranks_use_by_chance_are_reduced_by_synchronize(three: Any) -> None:
    """Some ranks use nothing in some steps, and some parts are used for the first time in a later step."""

    def fn(hvd: Any) -> list[torch.Tensor]:
        parameters = scalars(6, 0.0)
        optimizer = wrap(hvd, parameters)
        draw = random.Random(3)
        for step in range(12):
            used = [[i for i in range(6) if draw.random() < 0.4 and i <= step] for _ in range(3)]
            optimizer.zero_grad()
            loss = sum(((parameters[i] - i).sum() for i in used[hvd.rank()]), torch.zeros((), requires_grad=True))
            loss.backward()
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(parameters, 0.5)
            with optimizer.skip_synchronize():
                optimizer.step()
        return [p.detach() for p in parameters]

    results = three(fn)
    for result in results:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(result, results[0], strict=True))


def test_layers_that_ranks_drop_are_those_of_ddp(three: Any) -> None:
    class Dropping(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = torch.nn.ModuleList([torch.nn.Linear(3, 3) for _ in range(5)])

        def forward(self, x: torch.Tensor, kept: list[bool]) -> torch.Tensor:
            for layer, is_kept in zip(self.layers, kept, strict=True):
                if is_kept:
                    x = torch.tanh(layer(x))
            return x

    def train_dropping(net: Any, optimizer: Any, rank: int) -> torch.Tensor:
        draw = random.Random(5)
        for step in range(12):
            kept = [[layer == step % 5 or draw.random() < 0.6 for layer in range(5)] for _ in range(3)][rank]
            optimizer.zero_grad()
            net(torch.full((2, 3), 1.0 + rank), kept).sum().backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()
        return weights(net)

    def with_ddp(rank: int) -> torch.Tensor:
        ddp = torch.nn.parallel.DistributedDataParallel(Dropping(), find_unused_parameters=True)
        return train_dropping(ddp, torch.optim.SGD(ddp.parameters(), lr=0.5), rank)

    def fn(hvd: Any) -> tuple[torch.Tensor, torch.Tensor]:
        import torch.distributed as dist

        net = Dropping()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.5), net.named_parameters())
        ours = train_dropping(net, optimizer, hvd.rank())
        dist.init_process_group("gloo")
        try:
            return ours, with_ddp(hvd.rank())
        finally:
            dist.destroy_process_group()

    results = three(fn)
    for ours, peer in results:
        assert torch.equal(ours, results[0][0])
        torch.testing.assert_close(ours, peer, rtol=1e-6, atol=1e-6)


def test_ranks_that_compute_different_parts_do_not_wait_for_each_other(two: Any) -> None:
    """Experts that were first used in later steps, or have had some of the passes of a step: a rank each."""

    def fn(hvd: Any) -> list[float]:
        rank = hvd.rank()
        trunk, first, second = parameters = scalars(3, 0.0)
        optimizer = wrap(hvd, parameters, op=hvd.Sum)
        for step in range(6):
            optimizer.zero_grad()
            loss = trunk.sum()
            if step > 1:
                loss = loss + (first, second)[(rank + step) % 2].sum()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters if step > 1 else [trunk], 1e6)
            optimizer.step()
        seen = [p[0].item() for p in parameters]

        trunk, first, second = parameters = scalars(3, 0.0)
        optimizer = wrap(hvd, parameters, op=hvd.Sum, backward_passes_per_step=2)
        for _ in range(4):
            optimizer.zero_grad()
            (trunk + first + second).sum().backward()
            (trunk + (first, second)[rank]).sum().backward()
            optimizer.step()
        return seen + [p[0].item() for p in parameters]

    assert two(fn) == [[-12.0, -4.0, -4.0, -16.0, -12.0, -12.0]] * 2


def test_parameters_that_are_unfrozen_later_may_be_clipped_at_once(two: Any) -> None:
    def fn(hvd: Any) -> list[float]:
        body, _ = parameters = scalars(2)
        body.requires_grad_(False)
        optimizer = wrap(hvd, parameters)
        seen = []
        for step in range(4):
            body.requires_grad_(step >= 2)
            optimizer.zero_grad()
            (sum(p.sum() for p in parameters if p.requires_grad) * (hvd.rank() + 1)).backward()
            seen += [p.grad[0].item() for p in parameters if p.requires_grad]
            torch.nn.utils.clip_grad_norm_(parameters, 0.1)
            optimizer.step()
        return [*seen, *(p[0].item() for p in parameters)]

    first, second = two(fn)
    assert first == second
    assert first[:6] == [1.5] * 6


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("users", [(0,), (0, 1)], ids=["one rank", "all ranks"])
def test_gradients_that_are_first_seen_later_may_be_clipped_on_all_ranks(
    two: Any, passes: int, users: tuple[int, ...]
) -> None:
    def fn(hvd: Any) -> Any:
        torch.manual_seed(0)
        net = torch.nn.ModuleDict({name: torch.nn.Linear(3, 3) for name in ("trunk", "extra", "never")})
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, net.named_parameters(), backward_passes_per_step=passes)
        norms = []
        for step in range(4):
            optimizer.zero_grad()
            for number in range(passes):
                hidden = net["trunk"](torch.ones(2, 3) * (hvd.rank() + 1))
                if step == 2 and number == 0 and hvd.rank() in users:  # a branch that depends on the data
                    hidden = net["extra"](hidden)
                hidden.pow(2).mean().backward()
            norms.append(torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1).item())
            optimizer.step()
        return norms, weights(net).tolist()

    first, second = two(fn)
    assert first == second


@pytest.mark.parametrize("prefixes", [("", ""), ("a.", "b.")], ids=["equal names", "other names"])
def test_gradients_that_are_first_seen_later_do_not_mix_up_two_optimizers(two: Any, prefixes: tuple[str, str]) -> None:
    def fn(hvd: Any) -> list[float]:
        torch.manual_seed(0)
        nets, optimizers = [], []
        for prefix in prefixes:
            net = torch.nn.ModuleDict({name: torch.nn.Linear(3, 3) for name in ("trunk", "extra")})
            named = [(prefix + name, parameter) for name, parameter in net.named_parameters()]
            nets.append(net)
            optimizers.append(hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), named))
        for step in range(4):
            for optimizer in optimizers:
                optimizer.zero_grad()
            hidden = nets[0]["trunk"](torch.ones(2, 3) * (hvd.rank() + 1))
            if step == 2 and hvd.rank() == 0:
                hidden = nets[0]["extra"](hidden)
            nets[1]["trunk"](hidden).pow(2).mean().backward()
            for optimizer in reversed(optimizers):
                optimizer.step()
        return torch.cat([weights(net) for net in nets]).tolist()

    first, second = two(fn)
    assert first == second


@pytest.mark.parametrize("has_names", [True, False])
@pytest.mark.parametrize("user", [0, 1])
def test_a_rank_that_skips_the_first_optimizer_waits_for_nothing_but_the_second(
    two: Any, has_names: bool, user: int
) -> None:
    def fn(hvd: Any) -> list[Any]:
        branch, late, trunk, never = (torch.nn.Parameter(torch.ones(3)) for _ in range(4))
        optimizers = []
        for number, pair in enumerate([(branch, late), (trunk, never)]):
            named = [(f"{number}.{place}", parameter) for place, parameter in enumerate(pair)] if has_names else None
            optimizers.append(hvd.DistributedOptimizer(torch.optim.SGD(pair, lr=0.5), named))
        for step in range(6):
            loss = trunk.sum()
            if step in (0, 1, 5) or hvd.rank() == user:  # a branch that depends on the data
                loss = loss + branch.sum()
            if step == 3 and hvd.rank() == user:
                loss = loss + late.sum()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return [parameter.tolist() for parameter in (branch, late, trunk, never)]

    first, second = two(fn)
    assert first == second == [[-1.25] * 3, [0.75] * 3, [-2.0] * 3, [1.0] * 3]


@pytest.mark.parametrize("short", [0, 1, 2])
def test_a_rank_with_fewer_passes_agrees_after_what_the_others_wait_for_first(two: Any, short: int) -> None:
    def fn(hvd: Any) -> list[Any]:
        parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(4)]  # the last one is never used
        named = [(str(number), parameter) for number, parameter in enumerate(parameters)]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.5), named)
        for step in range(5):
            optimizer.zero_grad()
            for number in range(short if step == 3 and hvd.rank() == 1 else 3):
                parameters[number].sum().backward()
            optimizer.step()
        return [parameter.tolist() for parameter in parameters]

    first, second = two(fn)
    assert first == second == [[-1.5] * 3] * short + [[-1.25] * 3] * (3 - short) + [[1.0] * 3]


def test_gradients_of_reentrant_checkpoints_are_reduced_when_backward_returns(two: Any) -> None:
    def fn(hvd: Any) -> list[float]:
        torch.manual_seed(0)
        first, repeated = torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False)
        parameters = [first.weight, repeated.weight]
        optimizer = wrap(hvd, parameters, lr=0.1)
        norms = []
        for _ in range(4):
            optimizer.zero_grad()
            x = first(torch.full((1, 2), 1.0 + hvd.rank()))
            for _ in range(2):
                x = checkpoint(lambda x: torch.tanh(repeated(x)), x, use_reentrant=True)
            x.sum().backward()
            norms.append(torch.nn.utils.clip_grad_norm_(parameters, 0.05).item())
            optimizer.step()
        return norms

    first, second = two(fn)
    assert first == second


@pytest.mark.parametrize("unscales", [True, False])
def test_a_grad_scaler_and_clipping_need_no_synchronize(two: Any, unscales: bool) -> None:
    def fn(hvd: Any) -> list[float]:
        parameters = scalars(2)
        optimizer = wrap(hvd, parameters)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        norms = []
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(sum(p.sum() * (hvd.rank() + 1) for p in parameters)).backward()
            if unscales:
                scaler.unscale_(optimizer)
            norms.append(torch.nn.utils.clip_grad_norm_(parameters, 0.5).item())
            scaler.step(optimizer)
            scaler.update()
        return [*norms, *(p[0].item() for p in parameters)]

    first, second = two(fn)
    assert first == second
    assert first[0] == pytest.approx(3.0 if unscales else 24.0)


@pytest.mark.parametrize("is_last_hook", [True, False])
def test_what_a_hook_makes_of_a_gradient_is_reduced(two: Any, is_last_hook: bool) -> None:
    def fn(hvd: Any) -> list[list[float]]:
        parameters = scalars(2)

        def limit(p: torch.Tensor) -> None:
            p.grad.clamp_(max=1.0)

        def register() -> None:
            for p in parameters:
                p.register_post_accumulate_grad_hook(limit)

        if not is_last_hook:
            register()
        optimizer = wrap(hvd, parameters)
        if is_last_hook:
            register()
        seen = []
        for _ in range(3):
            optimizer.zero_grad()
            sum(p.sum() * (hvd.rank() + 0.5) for p in parameters).backward()
            seen.append([p.grad[0].item() for p in parameters])
            optimizer.step()
        return seen

    assert two(fn) == [[[0.75] * 2] * 3] * 2


@pytest.mark.parametrize("is_last_hook", [True, False])
def test_a_hook_may_take_the_step_of_its_parameter(two: Any, is_last_hook: bool) -> None:
    def fn(hvd: Any) -> list[list[float]]:
        parameters = scalars(3)
        optimizers: dict[torch.Tensor, Any] = {}

        def take_step(p: torch.Tensor) -> None:
            optimizers[p].step()
            optimizers[p].zero_grad()

        for number, p in enumerate(parameters):
            if not is_last_hook:
                p.register_post_accumulate_grad_hook(take_step)
            optimizers[p] = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), [(f"p{number}", p)])
            if is_last_hook:
                p.register_post_accumulate_grad_hook(take_step)
        for _ in range(3):
            sum(p.sum() * (hvd.rank() + 1) for p in parameters).backward()
        return [p.tolist() for p in parameters]

    start = scalars(1)[0][0].item()
    assert two(fn) == [[[start - 4.5] * len(scalars(1)[0])] * 3] * 2


def changed_in_flight(replaces: bool) -> None:
    import hvd_cluster.torch as hvd

    hvd.init()
    # Of two types, so that they travel in two buckets; the gradient of the last one comes first.
    first, last = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([first, last], lr=1.0), [("first", first), ("last", last)])
    steps = itertools.count()

    def change(_: torch.Tensor) -> None:
        if next(steps) == 2 and hvd.rank() == 0:
            if replaces:
                last.grad = last.grad * 2
            else:
                last.grad.mul_(2)

    first.register_post_accumulate_grad_hook(change)
    for _ in range(4):
        optimizer.zero_grad()
        ((first * 2).double() * last).sum().backward()
        optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize("replaces", [True, False])
def test_a_gradient_that_is_changed_in_flight_fails_on_all_ranks(replaces: bool) -> None:
    with pytest.raises(WorkerFailedError) as caught:
        local.run(changed_in_flight, (replaces,), num_proc=2, env={"OMP_NUM_THREADS": "1"})
    text = str(caught.value)
    assert "The gradient of 'last' was changed or replaced while it was being reduced (step 2 of this optimizer" in text
    assert "call optimizer.synchronize() first" in text
    assert "rank 1 raised hvd_cluster.errors.WorldEndedError" in text


def unfinished(how: str) -> None:
    import hvd_cluster.torch as hvd

    hvd.init()
    parameters = scalars(3)
    optimizer = wrap(hvd, parameters, backward_passes_per_step=2 if how == "partial" else 1)
    for step in range(3):
        optimizer.zero_grad()
        if how == "late" and step == 2:
            parameters[0].sum().backward()
            parameters[1].sum().backward()
        elif how == "partial" and step == 2:
            for p in parameters[:2]:
                (p + parameters[2]).sum().backward()
        else:
            for _ in range(2 if how == "partial" else 1):
                sum(p.sum() for p in parameters).backward()
        optimizer.step()


@pytest.mark.slow
def test_a_gradient_that_comes_after_its_reduction_names_the_remedy() -> None:
    with pytest.raises(WorkerFailedError) as caught:
        local.run(unfinished, ("late",), num_proc=2, env={"OMP_NUM_THREADS": "1"})
    text = str(caught.value)
    assert "The gradient of 'p1' had been reduced when another backward pass of the same step added to it" in text
    assert "pass their number as backward_passes_per_step to DistributedOptimizer (now 1)" in text


def test_passes_over_different_parts_are_summed_as_before() -> None:
    local.run(unfinished, ("partial",), num_proc=2, env={"OMP_NUM_THREADS": "1"})


def reduced_twice(how: str) -> None:
    import hvd_cluster.torch as hvd

    hvd.init()
    parameters = scalars(2)
    optimizer = wrap(hvd, parameters[:1], op=hvd.Sum)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(parameters[0].sum()).backward()
    if how == "parameters were added":
        optimizer.add_param_group({"params": parameters[1:]})
    else:
        optimizer.finish_reduction()
        parameters[0].sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["parameters were added", "another backward pass added to it"])
def test_a_sum_is_not_summed_again(how: str) -> None:
    with pytest.raises(WorkerFailedError, match=f"The gradient of 'p0' had been reduced when {how}"):
        local.run(reduced_twice, (how,), num_proc=2, env={"OMP_NUM_THREADS": "1"})


@pytest.mark.parametrize("op", ["Sum", "Average"])
def test_a_pass_that_adds_out_of_place_is_one_too_many(two: Any, op: str) -> None:
    def fn(hvd: Any) -> list[float]:
        parameters = scalars(1)
        optimizer = wrap(hvd, parameters, op=getattr(hvd, op))
        for _ in range(2):  # a penalty of the gradients needs their graph; each step has its own
            optimizer.zero_grad()
            parameters[0].pow(2).sum().backward(create_graph=True)
            optimizer.step()
        optimizer.zero_grad()
        parameters[0].pow(2).sum().backward(create_graph=True)
        with pytest.raises(AssertionError, match="more than backward_passes_per_step times"):
            parameters[0].pow(2).sum().backward(create_graph=True)
        optimizer.synchronize()
        parameters[0].grad = None
        return parameters[0].tolist()

    first, second = two(fn)
    assert first == second


def skipped(hvd: Any, how: str) -> list[float]:
    """Train on after a step that GradScaler has skipped because gradients had overflowed; rank 0's gradient is 1."""
    parameters = scalars(2)
    optimizer = wrap(hvd, parameters[:1], op=hvd.Sum)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(parameters[0].sum() * float("inf")).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    if how == "added":
        optimizer.zero_grad()
        optimizer.add_param_group({"params": parameters[1:]})
    else:
        parameters[0].grad.zero_()  # as zero_grad(set_to_none=False) does
    parameters[0].sum().backward()
    optimizer.step()
    return parameters[0].tolist()


@pytest.mark.parametrize("how", ["added", "zeroed"])
def test_a_sum_is_right_after_a_step_that_was_skipped(two: Any, how: str) -> None:
    first, second = two(skipped, how)
    assert first == second


def clipped_with_fewer_passes(hvd: Any, kind: str, synchronizes: bool) -> list[float]:
    """Train while rank 0 has fewer backward passes than the others in the last step."""
    table = torch.nn.Embedding(2, 1, sparse=True, _weight=torch.ones(2, 1))
    parameters = [table.weight] if kind == "sparse" else scalars(2)
    num_passes = 2 if kind == "short" else 1
    optimizer = wrap(hvd, parameters, backward_passes_per_step=num_passes)
    for step in range(3):
        optimizer.zero_grad()
        for _ in range(num_passes - (step == 2 and hvd.rank() == 0)):
            loss = table(torch.tensor([1])).sum() if kind == "sparse" else sum(p.sum() for p in parameters)
            (loss * (hvd.rank() + 1)).backward()
        if synchronizes:
            optimizer.synchronize()
        for parameter in parameters if step or kind != "short" else []:  # they are not reduced in the first step
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
        with optimizer.skip_synchronize() if synchronizes else nullcontext():
            optimizer.step()
    return torch.cat([p.detach().flatten() for p in parameters]).tolist()


def clipped_alone(kind: str) -> None:
    import hvd_cluster.torch as hvd

    hvd.init()
    clipped_with_fewer_passes(hvd, kind, synchronizes=False)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["short", "empty", "sparse"])
def test_clipping_while_another_rank_had_fewer_passes_fails_on_all_ranks(kind: str) -> None:
    with pytest.raises(WorkerFailedError) as caught:
        local.run(clipped_alone, (kind,), num_proc=2, env={"OMP_NUM_THREADS": "1"})
    text = str(caught.value)
    assert "changed or replaced, but another rank has done fewer backward passes" in text
    assert "(step 2 of this optimizer, from 0)" in text


@pytest.mark.parametrize("kind", ["short", "empty", "sparse"])
def test_clipping_after_synchronize_may_follow_fewer_passes(two: Any, kind: str) -> None:
    first, second = two(clipped_with_fewer_passes, kind, True)
    assert first == second


def summed_by_chance(seed: int, size: int, rank: int) -> int:
    """Train on sums of random parts of a model, in random passes; returns how often that was refused on all ranks."""
    import hvd_cluster.torch as hvd

    draw = random.Random(seed)
    count, passes_per_step = draw.randint(1, 6), draw.choice([1, 1, 2, 3])
    parameters = [
        torch.nn.Parameter(torch.zeros(2, dtype=draw.choice([torch.float32, torch.float64]))) for _ in range(count)
    ]
    optimizer = wrap(hvd, parameters, op=hvd.Sum, backward_passes_per_step=passes_per_step)
    expected = [0.0] * count

    def drawn_passes() -> list[list[int]]:
        left = [passes_per_step] * count
        passes = []
        for _ in range(draw.choice([passes_per_step, passes_per_step, 0, 1, passes_per_step + 1])):
            part = [number for number in range(count) if left[number] and draw.random() < 0.7]
            for number in part:
                left[number] -= 1
            passes.append(part)
        return passes

    for _ in range(5):
        passes = [drawn_passes() for _ in range(size)]
        optimizer.zero_grad()
        try:
            for part in passes[rank]:
                if part:
                    sum(parameters[number].sum() for number in part).backward()
            optimizer.step()
            hvd.barrier()
        except (hvd.GradientChangedError, hvd.HorovodInternalError) as error:
            assert "had been reduced when another backward pass of the same step added to it" in str(error)  # noqa: PT017
            return 1
        for part in itertools.chain(*passes):
            for number in part:
                expected[number] -= 1
        assert [p[0].item() for p in parameters] == expected
    return 0


def test_whatever_the_passes_of_a_step_reach_sums_are_right_or_refused_on_all_ranks() -> None:
    def fn() -> list[int]:
        import hvd_cluster.torch as hvd

        refused = []
        for seed in range(8):
            hvd.init()
            refused.append(summed_by_chance(seed, hvd.size(), hvd.rank()))
            hvd.shutdown()
        return refused

    first, *others = local.run(fn, num_proc=3, env={"OMP_NUM_THREADS": "1"})
    assert others == [first] * 2
    assert 0 < sum(first) < len(first)
