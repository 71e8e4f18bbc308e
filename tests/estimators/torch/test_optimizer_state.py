from __future__ import annotations

import copy
import pickle

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
