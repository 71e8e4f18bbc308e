"""DistributedOptimizer beside what training programs use: mixed precision, checkpoints, compilers, schedulers, GANs."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

EVERY_OPTIMIZER: dict[str, dict[str, Any]] = {
    "ASGD": {"lr": 0.1},
    "Adadelta": {"lr": 1.0},
    "Adafactor": {"lr": 0.05},
    "Adagrad": {"lr": 0.05},
    "Adam": {"lr": 0.01, "amsgrad": True},
    "AdamW": {"lr": 0.01, "weight_decay": 0.1},
    "Adamax": {"lr": 0.01},
    "Muon": {"lr": 0.01},
    "NAdam": {"lr": 0.01},
    "RAdam": {"lr": 0.01},
    "RMSprop": {"lr": 0.01, "momentum": 0.5},
    "Rprop": {"lr": 0.01},
    "SGD": {"lr": 0.1, "momentum": 0.9, "foreach": True},
    "Adam fused": {"lr": 0.01, "fused": True},
    "LBFGS": {"lr": 0.5, "max_iter": 4, "line_search_fn": "strong_wolfe"},
    "LBFGS plain": {"lr": 0.1, "max_iter": 4},
}


def make_net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))


def weights(net: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def data(step: int, num_rows: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(num_rows, 6, generator=generator), torch.randn(num_rows, 3, generator=generator)


def trained(net: torch.nn.Module, optimizer: Any, rank: int = 0, size: int = 1, steps: int = 4) -> torch.Tensor:
    """The weights after some steps on the share of ``rank`` of every batch."""
    for step in range(steps):
        x, y = (part.chunk(size)[rank] for part in data(step))

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(net(x), y)
            loss.backward()
            return loss

        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    return weights(net)


def class_of(kind: str) -> Any:
    return getattr(torch.optim, kind.split(maxsplit=1)[0], None)


def made(kind: str, net: torch.nn.Module) -> torch.optim.Optimizer:
    parameters = [p for p in net.parameters() if p.dim() == 2 or kind != "Muon"]
    optimizer: torch.optim.Optimizer = class_of(kind)(parameters, **EVERY_OPTIMIZER[kind])
    return optimizer


def test_every_optimizer_of_torch_gives_the_weights_of_one_process(two: Any) -> None:
    kinds = [kind for kind in EVERY_OPTIMIZER if class_of(kind) is not None]  # Muon came with torch 2.9

    def fn(hvd: Any) -> dict[str, torch.Tensor]:
        results = {}
        for kind in kinds:
            net = make_net()
            optimizer = hvd.DistributedOptimizer(made(kind, net))
            results[kind] = trained(net, optimizer, hvd.rank(), hvd.size())
        return results

    first, second = two(fn)
    for kind in kinds:
        net = make_net()
        expected = trained(net, made(kind, net))
        assert torch.equal(first[kind], second[kind]), kind
        torch.testing.assert_close(first[kind], expected, rtol=1e-3, atol=1e-4, msg=kind)


def test_a_grad_scaler_decides_alike_on_all_ranks(two: Any) -> None:
    """Unscaling in the usual places, no synchronize() in sight; the third step overflows on rank 1 only."""

    def fn(hvd: Any) -> Any:
        found = []
        for unscales, fused in [(False, False), (True, False), (False, True)]:
            net = make_net()
            optimizer = torch.optim.Adam(net.parameters(), lr=0.01, fused=fused)
            optimizer = hvd.DistributedOptimizer(optimizer, net.named_parameters())
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            scales = []
            for step in range(5):
                x, y = (part.chunk(2)[hvd.rank()] for part in data(step))
                optimizer.zero_grad()
                loss = scaler.scale(torch.nn.functional.mse_loss(net(x), y))
                (loss * float("inf") if step == 2 and hvd.rank() == 1 else loss).backward()
                if unscales:
                    scaler.unscale_(optimizer)
                    torch.nn.utils.clip_grad_norm_(net.parameters(), 1e3)
                scaler.step(optimizer)
                scaler.update()
                scales.append(scaler.get_scale())
            found.append((scales, weights(net)))
        return found

    net = make_net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for step in (0, 1, 3, 4):
        x, y = data(step)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
    first, second = two(fn)
    for (scales, result), (other_scales, other) in zip(first, second, strict=True):
        assert scales == other_scales == [1024.0, 1024.0, 512.0, 512.0, 512.0]
        assert torch.equal(result, other)
        torch.testing.assert_close(result, weights(net), rtol=1e-3, atol=1e-4)


def test_horovods_recipe_for_clipping_with_a_grad_scaler(two: Any) -> None:
    def fn(hvd: Any) -> Any:
        net = make_net()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        norms = []
        for step in range(3):
            x, y = (part.chunk(2)[hvd.rank()] for part in data(step))
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = torch.nn.functional.mse_loss(net(x), y)
            scaler.scale(loss).backward()
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            norms.append(torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1).item())
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
        return norms, weights(net)

    first, second = two(fn)
    assert first[0] == second[0]
    assert torch.equal(first[1], second[1])


def test_reading_the_parameter_groups_between_backward_and_step_changes_nothing(two: Any) -> None:
    def fn(hvd: Any) -> torch.Tensor:
        net = make_net()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters(), op=hvd.Sum
        )
        for step in range(3):
            x, y = (part.chunk(2)[hvd.rank()] for part in data(step))
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(net(x), y).backward()
            if hvd.rank() == 0:  # which logs the rate
                assert optimizer.param_groups[0]["lr"] == 0.1
            hvd.allreduce(torch.ones(1), name="in between")
            optimizer.step()
        return weights(net)

    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2)  # the sum of two means over halves
    expected = trained(net, optimizer, steps=3)
    for result in two(fn):
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


def test_reading_the_parameter_groups_between_two_backward_passes_adds_nothing_twice(two: Any) -> None:
    def fn(hvd: Any) -> list[list[float]]:
        first, second = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([first, second], lr=1.0), [("first", first), ("second", second)], op=hvd.Sum
        )
        seen = []
        for _ in range(3):
            optimizer.zero_grad()
            (first * (hvd.rank() + 1.0)).sum().backward()
            assert optimizer.param_groups[0]["lr"] == 1.0
            (second * 10.0).sum().backward()
            optimizer.step()
            seen.append([first.grad[0].item(), second.grad[0].item()])
        return seen

    assert two(fn) == [[[3.0, 20.0]] * 3] * 2


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_trains(two: Any, backend: str) -> None:
    def fn(hvd: Any) -> torch.Tensor:
        net = make_net()
        compiled = torch.compile(net, backend=backend)
        optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1, momentum=0.9)
        optimizer = hvd.DistributedOptimizer(optimizer, compiled.named_parameters())
        return trained(compiled, optimizer, hvd.rank(), hvd.size())

    net = make_net()
    expected = trained(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    for result in two(fn):
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


class Recomputing(torch.nn.Module):
    """A layer in several checkpoints: each accumulates its part of the layer's gradient."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.repeated, self.last = torch.nn.Linear(6, 5), torch.nn.Linear(5, 5), torch.nn.Linear(5, 3)
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(3):
            x = checkpoint(lambda x: torch.tanh(self.repeated(x)), x, use_reentrant=self.use_reentrant)
        last: torch.Tensor = checkpoint(self.last, x, use_reentrant=self.use_reentrant)
        return last


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpoints(two: Any, use_reentrant: bool) -> None:
    def fn(hvd: Any) -> torch.Tensor:
        net = Recomputing(use_reentrant)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
        return trained(net, optimizer, hvd.rank(), hvd.size())

    net = Recomputing(use_reentrant)
    expected = trained(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for result in two(fn):
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("freezes", [True, False])
def test_a_gan_trains_to_the_weights_of_one_process(two: Any, freezes: bool) -> None:
    """The generator's loss makes gradients of the critic, too; they are cleared, or not made at all."""

    def train(wrap: Any, rank: int, size: int) -> torch.Tensor:
        torch.manual_seed(0)
        generator, critic = torch.nn.Linear(3, 6), torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Linear(4, 1))
        optimizers = [wrap(torch.optim.Adam(net.parameters(), lr=0.02)) for net in (generator, critic)]
        for step in range(4):
            real, noise = (part.chunk(size)[rank] for part in data(step))
            critic.zero_grad()
            loss = critic(real).mean() - critic(generator(noise).detach()).mean() + critic(real * 2).square().mean()
            loss.backward()
            optimizers[1].step()
            generator.zero_grad()
            critic.requires_grad_(not freezes)
            critic(generator(noise)).mean().backward()
            critic.requires_grad_(True)
            optimizers[0].step()
        return torch.cat([weights(generator), weights(critic)])

    def fn(hvd: Any) -> torch.Tensor:
        return train(hvd.DistributedOptimizer, hvd.rank(), hvd.size())

    expected = train(lambda optimizer: optimizer, 0, 1)
    for result in two(fn):
        torch.testing.assert_close(result, expected, rtol=1e-3, atol=1e-4)


def test_schedulers_of_either_optimizer_drive_the_rate_without_a_warning(two: Any) -> None:
    def fn(hvd: Any) -> list[list[float]]:
        found = []
        for wraps_first in (True, False):
            net = make_net()
            plain = torch.optim.SGD(net.parameters(), lr=1.0, momentum=0.9)
            schedule = torch.optim.lr_scheduler.OneCycleLR if wraps_first else torch.optim.lr_scheduler.StepLR
            options = {"max_lr": 1.0, "total_steps": 10} if wraps_first else {"step_size": 1, "gamma": 0.5}
            if wraps_first:
                optimizer = hvd.DistributedOptimizer(plain, net.named_parameters())
                scheduler = schedule(optimizer, **options)
            else:
                scheduler = schedule(plain, **options)
                optimizer = hvd.DistributedOptimizer(plain, net.named_parameters())
            rates = []
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                for step in range(4):
                    rates.append(optimizer.param_groups[0]["lr"])
                    optimizer.zero_grad()
                    net(data(step)[0]).sum().backward()
                    optimizer.step()
                    scheduler.step()
                    if step == 1:  # the scheduler still acts on the groups in use
                        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            found.append(rates)
        return found

    (cycle, steps), second = two(fn)
    assert steps == [1.0, 0.5, 0.25, 0.125]
    assert len(set(cycle)) == 4
    assert second == [cycle, steps]


def test_copies_and_pickles_reduce_like_the_original(two: Any) -> None:
    def fn(hvd: Any) -> list[torch.Tensor]:
        net = make_net()
        groups = [list(net[0].parameters())]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.Adam(net.parameters(), lr=0.01), net.named_parameters(), groups=groups
        )
        trained(net, optimizer, hvd.rank(), hvd.size(), steps=2)
        copies = [copy.deepcopy((net, optimizer)), pickle.loads(pickle.dumps((net, optimizer)))]
        assert all(type(other).__name__ == "Adam" and isinstance(other, torch.optim.Adam) for _, other in copies)
        return [trained(*pair, hvd.rank(), hvd.size(), steps=3) for pair in ((net, optimizer), *copies)]

    net = make_net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    trained(net, optimizer, steps=2)
    expected = trained(net, optimizer, steps=3)
    for results in two(fn):
        for result in results:
            torch.testing.assert_close(result, expected, rtol=1e-3, atol=1e-4)


def test_step_hooks_see_reduced_gradients_and_run_once(two: Any) -> None:
    def fn(hvd: Any) -> list[float]:
        weight = torch.nn.Parameter(torch.zeros(1))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("w", weight)])
        seen: list[float] = []
        optimizer.register_step_pre_hook(lambda *_: seen.append(weight.grad.item()))
        optimizer.register_step_post_hook(lambda *_: seen.append(weight.item()))
        (weight * (hvd.rank() + 1)).backward()
        optimizer.step()
        return seen

    assert two(fn) == [[1.5, -1.5]] * 2


def test_a_second_step_after_synchronize_does_not_sum_again(two: Any) -> None:
    def fn(hvd: Any) -> float:
        weight = torch.nn.Parameter(torch.zeros(1))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("w", weight)], op=hvd.Sum)
        (weight * 1).backward()
        optimizer.synchronize()
        with pytest.warns(UserWarning, match="called without optimizer.skip_synchronize"):
            optimizer.step()
        return weight.item()

    assert two(fn) == [-2.0] * 2


def test_wrapping_twice_is_refused(two: Any) -> None:
    def fn(hvd: Any) -> None:
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(make_net().parameters(), lr=1.0))
        with pytest.raises(ValueError, match="already distributed"):
            hvd.DistributedOptimizer(optimizer)

    two(fn)


def test_wrapping_needs_a_world_and_an_unpickled_copy_says_so_at_its_first_gradient(two: Any) -> None:
    def fn(hvd: Any) -> str:
        net = make_net()
        pickled = pickle.dumps((net, hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0))))
        hvd.barrier()
        hvd.shutdown()
        with pytest.raises(ValueError, match="has not been initialized"):
            hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0))
        net, optimizer = pickle.loads(pickled)
        try:
            net(data(0)[0]).sum().backward()
        except hvd.HorovodInternalError as error:
            return str(error)
        finally:
            hvd.init()
        return f"nothing was raised, {optimizer}"

    assert all("has not been initialized" in text for text in two(fn))
