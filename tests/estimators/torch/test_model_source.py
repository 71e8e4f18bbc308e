"""Modules that a function makes in each process."""

from __future__ import annotations

import os
import pickle
import time
from concurrent.futures import ThreadPoolExecutor

import cloudpickle
import numpy as np
import pytest
import torch
from torch.nn.utils.parametrizations import weight_norm

from hvd_cluster.errors import DataError
from hvd_cluster.estimators import ModelFactory
from hvd_cluster.estimators.torch.model_source import ModelSource, is_lazy
from hvd_cluster.estimators.torch.portable_model import PortableModule, PortableOptimizer

pytestmark = pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")


def state_of(factory, seed=0):
    return ModelSource(factory=factory, seed=seed).build().state_dict()


def equal(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_the_same_seed_gives_the_same_weights_and_leaves_the_generators_alone():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    first = state_of(lambda: torch.nn.Linear(2, 2))
    assert torch.equal(torch.rand(2), expected)
    assert equal(first, state_of(lambda: torch.nn.Linear(2, 2)))
    assert not equal(first, state_of(lambda: torch.nn.Linear(2, 2), seed=1))


def test_threads_that_make_models_at_once_do_not_get_each_others_numbers():
    def slow():
        first = torch.nn.Linear(2, 2)
        time.sleep(0.01)
        return torch.nn.Sequential(first, torch.nn.Linear(2, 2))

    expected = state_of(slow)
    torch.manual_seed(3)
    number = torch.rand(1)
    torch.manual_seed(3)
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: state_of(slow), range(6)))
    assert all(equal(each, expected) for each in found)
    assert torch.equal(torch.rand(1), number)


def test_a_class_of_modules_is_a_factory():
    assert isinstance(ModelSource(factory=torch.nn.Identity, seed=0).build(), torch.nn.Identity)


@pytest.mark.parametrize(("result", "what"), [(None, "None"), ({}, "an object of type dict")])
def test_a_factory_must_return_a_module(result, what):
    with pytest.raises(
        DataError, match=rf"model: ModelFactory\(.*\) must return a torch.nn.Module, and returned {what}"
    ):
        state_of(ModelFactory(lambda value: value, result))


def test_a_factory_that_fails_is_named_with_its_arguments():
    with pytest.raises(DataError, match=r"model: ModelFactory\(load, '/no/such'\) failed: FileNotFoundError"):
        state_of(ModelFactory(np.load, "/no/such"))
    with pytest.raises(TypeError, match="takes a function that makes a model, not int"):
        ModelFactory(3)


def test_lazy_layers_get_their_shapes_from_a_call_that_changes_no_running_mean():
    def make():
        return torch.nn.Sequential(torch.nn.LazyLinear(3), torch.nn.LazyBatchNorm1d(), torch.nn.Linear(3, 1))

    source, lazy = ModelSource.of(make, 0)
    assert is_lazy(lazy)
    source, sized = source.sized([torch.ones(2, 5)])
    assert sized[0].weight.shape == (3, 5)
    assert sized[1].num_batches_tracked == 0
    assert equal(sized.state_dict(), source.build().state_dict())
    with pytest.raises(DataError, match="the call that sizes lazy layers failed: TypeError"):
        source.sized([torch.ones(2, 5), torch.ones(2, 5)])


def test_modules_of_the_meta_device_get_values_and_stay_tied():
    def make():
        with torch.device("meta"):
            net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 3))
            net.append(torch.nn.MultiheadAttention(4, 2))
            net[2].weight = net[0].weight
            net[0].bias.requires_grad_(False)
        return net

    net = ModelSource(factory=make, seed=0).build()
    assert net[0].weight is net[2].weight
    assert torch.equal(net[1].running_var, torch.ones(3))
    assert net[0].weight.abs().max() < 1
    assert not net[0].bias.requires_grad
    assert equal(net.state_dict(), state_of(make))


def test_loaded_tensors_beside_some_of_the_meta_device_keep_their_values_and_stay_tied():
    loaded = {"0.weight": torch.full((2, 2), 7.0), "2.running_mean": torch.full((2,), 5.0)}

    def make():
        with torch.device("meta"):
            net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
        net.load_state_dict(loaded, strict=False, assign=True)
        net[1].weight = net[0].weight
        return net

    net = ModelSource(factory=make, seed=0).build()
    assert torch.equal(net[0].weight, loaded["0.weight"])
    assert net[0].weight is net[1].weight
    assert torch.equal(net[2].running_mean, loaded["2.running_mean"])
    assert torch.equal(net[2].running_var, torch.ones(2))
    assert 0 < net[0].bias.abs().max() < 1


def test_a_module_of_the_meta_device_without_initial_values_is_named():
    class Scale(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.factor = torch.nn.Parameter(torch.ones(1))

    def make():
        with torch.device("meta"):
            return torch.nn.Sequential(torch.nn.Linear(1, 1), Scale())

    with pytest.raises(DataError, match=r"model: 1 on the meta device cannot get values without reset_parameters\(\)"):
        state_of(make)


def test_a_module_travels_as_its_factory_and_what_was_trained():
    def make():
        net = torch.nn.Sequential(torch.nn.Linear(500, 500), weight_norm(torch.nn.Linear(500, 2)))
        net[0].requires_grad_(False)
        return net

    source, net = ModelSource.of(make, 0)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.25)
    net(torch.ones(1, 500)).sum().backward()
    optimizer.step()
    form = PortableModule(source, net)
    blob = cloudpickle.dumps({"optimizer": PortableOptimizer(optimizer, form), "model": form})
    assert len(blob) < 50_000
    found = pickle.loads(blob)
    twin, built = found["model"], found["optimizer"]
    assert equal(net.state_dict(), twin.state_dict())
    assert not twin[0].weight.requires_grad
    assert built.param_groups[0]["params"][0] is twin[0].weight
    assert torch.equal(built.state[twin[1].bias]["exp_avg"], optimizer.state[net[1].bias]["exp_avg"])


def test_a_module_that_the_factory_no_longer_makes_travels_as_a_whole():
    def make():
        net = torch.nn.Linear(3, 1)
        return net.requires_grad_(False)

    source, _ = ModelSource.of(make, 0)
    other = torch.nn.Linear(4, 1)
    assert isinstance(pickle.loads(cloudpickle.dumps(PortableModule(source, other))), torch.nn.Linear)
    changed = torch.nn.Linear(3, 1)
    assert equal(changed.state_dict(), pickle.loads(cloudpickle.dumps(PortableModule(source, changed))).state_dict())


def test_a_factory_that_makes_another_frozen_part_is_noticed():
    def make():
        net = torch.nn.Linear(2, 1)
        net.weight.requires_grad_(False)
        net.weight.data.fill_(int.from_bytes(os.urandom(2), "big") + np.random.rand())
        return net

    source, net = ModelSource.of(make, 0)
    blob = cloudpickle.dumps(PortableModule(source, net))
    with pytest.raises(DataError, match=r"make does not always make the same model: 'weight' .* has other values"):
        pickle.loads(blob)
