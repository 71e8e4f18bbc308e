"""op=hvd.Adasum: every rank takes its own step, and the changes are combined."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch


def combined(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Adasum of two vectors, as arXiv:2006.02924 defines it."""
    a, b = a.double(), b.double()
    dot = (a * b).sum()
    first = 1 - dot / (2 * (a * a).sum()) if a.any() else 1.0
    second = 1 - dot / (2 * (b * b).sum()) if b.any() else 1.0
    return (a * first + b * second).float()


def make_net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * step + rank))


@pytest.mark.parametrize("kind", ["SGD", "Adam"])
def test_changes_of_the_weights_are_combined_per_tensor(two: Any, kind: str) -> None:
    options: dict[str, Any] = {"lr": 0.1} | ({"momentum": 0.9} if kind == "SGD" else {})

    def fn(hvd: Any) -> list[torch.Tensor]:
        net = make_net()
        optimizer = getattr(torch.optim, kind)(net.parameters(), **options)
        optimizer = hvd.DistributedOptimizer(optimizer, net.named_parameters(), op=hvd.Adasum)
        assert isinstance(optimizer, getattr(torch.optim, kind))
        assert type(optimizer).__name__ == kind
        for step in range(3):
            optimizer.zero_grad()
            net(batch(step, hvd.rank())).square().sum().backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 5.0)
            optimizer.step()
        with pytest.raises(AssertionError, match="not supported when using Adasum"), optimizer.skip_synchronize():
            pass
        getattr(torch.optim, kind)(net.parameters(), **options).load_state_dict(optimizer.state_dict())
        return [p.detach() for p in net.parameters()]

    nets = [make_net(), make_net()]
    optimizers = [getattr(torch.optim, kind)(net.parameters(), **options) for net in nets]
    for step in range(3):
        starts = [p.detach().clone() for p in nets[0].parameters()]
        for rank, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            optimizer.zero_grad()
            net(batch(step, rank)).square().sum().backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 5.0)
            optimizer.step()
        with torch.no_grad():
            for start, mine, theirs in zip(starts, *(net.parameters() for net in nets), strict=True):
                result = start + combined(mine - start, theirs - start)
                mine.copy_(result)
                theirs.copy_(result)
    first, second = two(fn)
    for mine, theirs, expected in zip(first, second, nets[0].parameters(), strict=True):
        assert torch.equal(mine, theirs)
        torch.testing.assert_close(mine, expected.detach(), rtol=1e-3, atol=1e-5)


def test_a_rank_without_gradients_or_with_overflowed_ones_contributes_nothing(two: Any) -> None:
    def fn(hvd: Any) -> list[Any]:
        weight, unused = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight, unused], lr=1.0)
        optimizer = hvd.DistributedOptimizer(optimizer, [("w", weight), ("u", unused)], op=hvd.Adasum)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        found = []
        for step in range(3):
            optimizer.zero_grad()
            factor = float("inf") if step == 1 and hvd.rank() == 1 else 1.0
            if step < 2 or hvd.rank() == 0:
                scaler.scale(weight[hvd.rank()] * factor).backward()
                if step == 2:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            found.append(weight.tolist())
        return [*found, unused.item()]

    # The axes are orthogonal, so the changes add up.
    expected = [[-1.0, -1.0], [-2.0, -1.0], [-3.0, -1.0], 1.0]
    assert two(fn) == [expected] * 2


def test_what_adasum_cannot_do_is_refused(two: Any) -> None:
    def fn(hvd: Any) -> None:
        hvd.shutdown()
        pair = hvd.ProcessSet([0])
        hvd.init(process_sets=[pair])
        weight = torch.nn.Parameter(torch.zeros(2))
        with pytest.raises(NotImplementedError, match="process sets"):
            hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=hvd.Adasum, process_set=pair)
        hvd.shutdown()
        hvd.init()

    two(fn)


@pytest.mark.parametrize("frozen", [("1", "2"), ("0", ""), ("012", ""), ("012", "0")])
def test_ranks_that_have_frozen_different_parameters_do_not_mix_them_up(two: Any, frozen: tuple[str, str]) -> None:
    def fn(hvd: Any) -> list[float]:
        weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
        named = [(str(i), weight) for i, weight in enumerate(weights)]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(weights, lr=1.0), named, op=hvd.Adasum)
        for i, weight in enumerate(weights):
            weight.requires_grad_(str(i) not in frozen[hvd.rank()])
        loss = sum(weight.sum() for weight in weights)
        if loss.requires_grad:
            loss.backward()
        with pytest.raises(hvd.HorovodInternalError, match="frozen different parameters"):
            optimizer.step()
        assert all(weight.tolist() == [0.0, 0.0] for weight in weights)  # no rank has gone its own way
        for weight in weights:  # and what all have frozen does not hold anybody up
            weight.requires_grad_(False)
        optimizer.step()
        weights[2].requires_grad_(True)
        optimizer.zero_grad()
        before = weights[2].tolist()
        weights[2].sum().backward()
        optimizer.step()
        return [after - start for after, start in zip(weights[2].tolist(), before, strict=True)]

    assert two(fn) == [[-1.0, -1.0]] * 2


def test_the_number_of_ranks_has_to_be_a_power_of_two(three: Any) -> None:
    def fn(hvd: Any) -> None:
        weight = torch.nn.Parameter(torch.zeros(2))
        with pytest.raises(NotImplementedError, match="has to be a power of two; it is 3"):
            hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=hvd.Adasum)

    three(fn)


def test_a_world_of_one_steps_as_usual() -> None:
    import hvd_cluster.torch as hvd

    hvd.init()
    try:
        weight = torch.nn.Parameter(torch.zeros(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=hvd.Adasum)
        weight.sum().backward()
        optimizer.step()
    finally:
        hvd.shutdown()
    assert weight.tolist() == [-1.0, -1.0]


def test_an_elastic_job_that_begins_with_one_rank_combines_changes_as_soon_as_there_are_two(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import hvd_cluster.torch as hvd
    from hvd_cluster.torch.delta_optimizer import DeltaOptimizer

    hvd.init()
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    try:
        weight = torch.nn.Parameter(torch.zeros(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=hvd.Adasum)
        assert isinstance(optimizer, DeltaOptimizer)
        weight.sum().backward()
        optimizer.step()
    finally:
        hvd.shutdown()
    assert weight.tolist() == [-1.0, -1.0]


def test_weights_stay_equal_when_parameters_are_added_later_and_in_copies(two: Any) -> None:
    def fn(hvd: Any) -> list[torch.Tensor]:
        net = make_net()
        optimizer = torch.optim.Adam(net[0].parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, net[0].named_parameters(), op=hvd.Adasum)

        def step(number: int) -> None:
            net.zero_grad()
            net(batch(number, hvd.rank())).square().sum().backward()
            optimizer.step()

        step(0)
        optimizer.add_param_group({"params": [net[2].weight]})
        step(1)
        optimizer.param_groups[1]["params"].append(net[2].bias)
        step(2)
        net, optimizer = copy.deepcopy((net, optimizer))
        step(3)
        net, optimizer = pickle.loads(pickle.dumps((net, optimizer)))
        step(4)
        assert type(optimizer).__name__ == "Adam"
        return [p.detach() for p in net.parameters()]

    for mine, theirs, start in zip(*two(fn), make_net().parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert not torch.equal(mine, start)


def test_a_scheduler_that_holds_the_original_still_drives_the_wrapped_optimizer(two: Any) -> None:
    def fn(hvd: Any) -> list[float]:
        weight = torch.nn.Parameter(torch.zeros(2))
        original = torch.optim.SGD([weight], lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(original, step_size=1, gamma=0.5)
        optimizer = hvd.DistributedOptimizer(original, op=hvd.Adasum)
        rates = []
        for _ in range(3):
            weight.sum().backward()
            optimizer.step()
            optimizer.load_state_dict(optimizer.state_dict())
            rates.append(optimizer.param_groups[0]["lr"])
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                scheduler.step()
        return rates

    assert two(fn) == [[1.0, 0.5, 0.25]] * 2
