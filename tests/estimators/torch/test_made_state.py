"""The part of a state that a factory does not make."""

from __future__ import annotations

import re

import pytest
import torch

from hvd_cluster.estimators.torch import made_state
from hvd_cluster.estimators.torch.made_state import TrainedPart, contents, first_difference


def frozen_and_trainable(seed=0):
    torch.manual_seed(seed)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    net[0].requires_grad_(False)
    return net


def test_trainable_parameters_are_kept_and_what_has_changed():
    net = frozen_and_trainable()
    part = TrainedPart(contents(net))
    trainable = {"1.weight", "1.bias", "2.weight", "2.bias"}
    assert set(part.of(net)) == trainable
    net(torch.ones(2, 3))
    assert set(part.of(net)) == trainable | {"1.running_mean", "1.running_var", "1.num_batches_tracked"}


def test_a_frozen_parameter_that_changes_nevertheless_is_kept():
    for change in (
        lambda weight: weight.data.mul_(0.5),  # the usual moving average
        lambda weight: torch.nn.init.zeros_(weight),
    ):
        net = frozen_and_trainable()
        part = TrainedPart(contents(net))
        change(net[0].weight)
        assert "0.weight" in part.of(net)
    net = frozen_and_trainable()
    part = TrainedPart(contents(net))
    assert "0.weight" not in part.of(net)
    net[0].weight.data.mul_(0.5)  # torch does not count this
    assert "0.weight" in part.of(net)


def test_numbers_that_change_places_are_a_change():
    net = torch.nn.Linear(64, 64, bias=False).requires_grad_(False)
    part = TrainedPart(contents(net))
    assert not part.of(net)
    net.weight.data = net.weight.data.flip(1)
    assert "weight" in part.of(net)


def test_a_parameter_that_was_trainable_at_any_time_is_kept():
    net = frozen_and_trainable()
    part = TrainedPart(contents(net))
    net[2].requires_grad_(False)
    assert "2.weight" in part.of(net)
    net[0].requires_grad_(True)
    assert "0.weight" in part.of(net)
    net[0].requires_grad_(False)
    assert "0.weight" in part.of(net)


def test_the_part_and_the_factory_make_the_module_again():
    net = frozen_and_trainable()
    part = TrainedPart(contents(net))
    net(torch.ones(2, 3))
    torch.nn.init.ones_(net[2].weight)
    twin = frozen_and_trainable()
    made_state.load(twin, part.of(net))
    assert all(torch.equal(value, twin.state_dict()[name]) for name, value in net.state_dict().items())


def test_a_part_that_lacks_a_trainable_parameter_is_refused():
    net = frozen_and_trainable()
    part = TrainedPart(contents(net)).of(net)
    del part["2.bias"]
    with pytest.raises(RuntimeError, match=r"missing: \['2.bias'\]"):
        made_state.load(frozen_and_trainable(), part)
    with pytest.raises(RuntimeError, match=r"unexpected: \['other'\]"):
        made_state.load(frozen_and_trainable(), {**part, "2.bias": net[2].bias, "other": torch.ones(1)})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda net: torch.nn.init.zeros_(net[0].bias), r"'0.bias' \(float32 \(4,\)\) has other values"),
        (lambda net: net[0].requires_grad_(True), "'0.weight' is trainable, and was frozen"),
        (lambda net: net.append(torch.nn.Linear(1, 1)), "'3.weight' is new"),
        (lambda net: net.pop(2), "'2.weight' is missing"),
        (lambda net: net[2].double(), r"'2.weight' is float64 \(1, 4\), and was float32 \(1, 4\)"),
        (lambda net: torch.nn.init.zeros_(net[2].bias), "^$"),  # rank 0 sends it
    ],
)
def test_the_first_difference_is_named(change, text):
    net = frozen_and_trainable()
    before = contents(net)
    change(net)
    assert re.search(text, first_difference(before, contents(net)))


def test_every_dtype_and_layout_has_a_hash():
    values = [
        torch.tensor(1.0),
        torch.zeros(0),
        torch.ones(2, dtype=torch.bfloat16),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.tensor([True, False]),
        torch.ones(3, 2).t(),
        torch.eye(2).to_sparse(),
    ]
    for value in values:
        module = torch.nn.Module()
        module.register_buffer("value", value)
        assert contents(module)["value"] == contents(module)["value"]
        part = TrainedPart(contents(module))
        assert [list(part.of(module)) for _ in range(2)] == [[], []]
