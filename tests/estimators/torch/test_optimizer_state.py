from __future__ import annotations

import copy
import math
import pickle

import cloudpickle
import pytest
import torch

from hvd_cluster.estimators.torch.optimizer_state import OptimizerState


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.8, 0.9), weight_decay=0.1),
        lambda p: torch.optim.Adagrad(p, lr=0.01),
    ],
)
@pytest.mark.parametrize("steps_before", [0, 2])
def test_an_optimizer_built_again_makes_the_same_steps(make, steps_before):
    model = net()
    optimizer = make(model.parameters())
    for _ in range(steps_before):
        step(model, optimizer)
    twin = copy.deepcopy(model)
    rebuilt = pickle.loads(pickle.dumps(OptimizerState.of(optimizer, model))).build(twin)
    assert type(rebuilt) is type(optimizer)
    for _ in range(3):
        step(model, optimizer)
        step(twin, rebuilt)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_param_groups_keep_their_parameters_and_hyperparameters():
    model = net()
    groups = [{"params": model[1].parameters(), "lr": 0.5}, {"params": [model[0].bias], "weight_decay": 0.2}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    twin = copy.deepcopy(model)
    rebuilt = OptimizerState.of(optimizer, model).build(twin)
    first, second = rebuilt.param_groups
    assert first["params"][0] is twin[1].weight
    assert second["params"] == [twin[0].bias]
    assert (first["lr"], second["lr"], second["weight_decay"]) == (0.5, 0.1, 0.2)


def test_an_optimizer_over_another_copy_of_the_model_is_matched_in_order():
    model = net()
    optimizer = torch.optim.SGD(copy.deepcopy(model).parameters(), lr=0.1)
    assert OptimizerState.of(optimizer, model).groups[0][0] == (0, 1, 2, 3)


def test_an_optimizer_of_another_model_is_refused():
    with pytest.raises(ValueError, match=r"not those of the model.*model\.parameters"):
        OptimizerState.of(torch.optim.SGD(torch.nn.Linear(7, 7).parameters(), lr=0.1), net())


class Signed(torch.optim.Optimizer):
    """Keeps its options in the ways that optimizers outside of torch do."""

    def __init__(self, params, rho, *, lr=0.1, sign=1.0, scale=abs):
        super().__init__(params, {"lr": lr})
        self.rho, self.sign, self.scale = rho, sign, scale
        self.held = [parameter for group in self.param_groups for parameter in group["params"]]
        self.count = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        for parameter in self.held:
            parameter -= self.sign * self.rho * self.scale(self.count) * self.param_groups[0]["lr"] * parameter.grad


def test_options_outside_of_the_defaults_are_kept():
    before, after = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    optimizer = Signed(before.parameters(), 0.5, sign=-1.0, scale=math.sqrt)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # puts its own things into the optimizer
    before(torch.ones(2)).backward()
    optimizer.step()
    after.load_state_dict(before.state_dict())
    built = pickle.loads(cloudpickle.dumps(OptimizerState.of(optimizer, before))).build(after)
    assert (built.rho, built.sign, built.scale, built.count) == (0.5, -1.0, math.sqrt, 1)
    for model, steps in ((before, optimizer), (after, built)):
        model.zero_grad()
        model(torch.ones(2)).backward()
        steps.step()
    assert torch.equal(before.weight, after.weight)


def test_an_argument_that_an_optimizer_does_not_keep_is_named():
    class Forgetful(torch.optim.SGD):
        def __init__(self, params, power):
            super().__init__(params, lr=2.0**power)

    model = torch.nn.Linear(2, 1)
    with pytest.raises(ValueError, match="Forgetful is made again on each worker, and does not keep .* 'power': store"):
        OptimizerState.of(Forgetful(model.parameters(), 3), model)
