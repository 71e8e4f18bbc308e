"""Models that PyTorch does not copy or pickle by itself: they train, come back, score, and are saved and loaded."""

from __future__ import annotations

import copy
import pickle
import sys
import warnings
from typing import NamedTuple

import cloudpickle
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils import parametrizations, parametrize, prune

from hvd_cluster.errors import DataError, LaunchError
from hvd_cluster.estimators import TorchEstimator, TorchModel
from hvd_cluster.estimators.run.checkpoint import packed, unpacked
from hvd_cluster.estimators.torch.model_pickling import copied, make_picklable, on_cpu

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Attends(torch.nn.Module):
    """Keeps a tensor of its last call's graph."""

    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
        self.attention = None

    def forward(self, x):
        self.attention = torch.softmax(self.first(x), dim=1)
        return self.last(self.attention * x)


class Place(NamedTuple):
    weights: torch.Tensor
    step: int


class Kept(list): ...


class Logs(torch.nn.Module):
    """Has a file handle two levels down."""

    def __init__(self, file):
        super().__init__()
        self.encoder = torch.nn.Sequential(torch.nn.Linear(4, 1))
        self.encoder[0].log = file

    def forward(self, x):
        return self.encoder(x)


def attends():
    module = Attends()
    module(torch.ones(2, 4))
    return module


def pruned():
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    prune.l1_unstructured(module[0], "weight", amount=0.25)
    module(torch.ones(2, 4))
    return module


def parametrized(register):
    def make():
        return torch.nn.Sequential(register(torch.nn.Linear(4, 4)), torch.nn.Tanh(), torch.nn.Linear(4, 1))

    return make


def scripted():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)))


def partly_traced():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nn.Sequential(torch.jit.trace(torch.nn.Linear(4, 4), torch.ones(2, 4)), torch.nn.Linear(4, 1))


MODELS = {
    "attends": attends,
    "pruned": pruned,
    "spectral_norm": parametrized(parametrizations.spectral_norm),
    "weight_norm": parametrized(parametrizations.weight_norm),
    "orthogonal": parametrized(parametrizations.orthogonal),
    "scripted": scripted,
    "partly_traced": partly_traced,
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_on_workers_comes_back_and_is_saved(frame, two_workers, tmp_path, name):
    torch.manual_seed(0)
    model = MODELS[name]()
    given = {"loss": F.mse_loss, "feature_cols": ["x"], "label_cols": ["y"], "batch_size": 8, "verbose": 0}
    estimator = TorchEstimator(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.02),
        epochs=4,
        validation=0.2,
        return_best=True,
        store=tmp_path / "store",
        run_id="run",
        backend=two_workers,
        **given,
    )
    fitted = estimator.fit(frame)
    losses = [record["train"]["loss"] for record in fitted.getHistory()]
    assert losses[-1] < losses[0]
    scored = fitted.transform(frame)["y__output"]
    fitted.save(str(tmp_path / "model"))
    assert TorchModel.load(str(tmp_path / "model")).transform(frame)["y__output"].equals(scored)
    again = estimator.copy({estimator.epochs: 5}).fit(frame)  # from its checkpoint
    assert len(again.getHistory()) == 5


@pytest.mark.parametrize("name", ["spectral_norm", "weight_norm", "orthogonal", "scripted", "partly_traced"])
def test_pickle_takes_them_and_what_it_rebuilds_again(name):
    model = MODELS[name]().eval()
    x = torch.randn(3, 4)
    make_picklable(model)
    for _ in range(2):
        # Of PyTorch's own functions, those of weight_norm are local ones, which plain pickle does not take.
        dumps = cloudpickle.dumps if name == "weight_norm" else pickle.dumps
        rebuilt = pickle.loads(dumps(model))
        assert not rebuilt.training
        assert torch.equal(rebuilt(x), model(x))
        assert rebuilt.state_dict().keys() == model.state_dict().keys()
        model = rebuilt
    if name == "spectral_norm":
        assert parametrize.is_parametrized(model[0], "weight")
        assert torch.equal(copy.deepcopy(model)(x), model(x))


def test_a_copy_shares_nothing():
    model = attends()
    twin = copied(model)
    with torch.no_grad():
        twin.first.weight.zero_()
    assert model.first.weight.abs().sum() > 0


def test_an_attribute_that_cannot_travel_is_named_with_its_path(frame, one_worker, tmp_path):
    with (tmp_path / "log").open("w") as file:
        model = Logs(file)
        with pytest.raises(DataError, match=r"model\.encoder\.0\.log \(TextIOWrapper\) cannot be copied"):
            copied(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        given = {"loss": F.mse_loss, "feature_cols": ["x"], "label_cols": ["y"], "backend": one_worker}
        with pytest.raises(LaunchError, match=r"model\.encoder\.0\.log \(TextIOWrapper\) .* set it to None before fit"):
            TorchEstimator(model=model, optimizer=optimizer, **given).fit(frame)


class Versioned(torch.nn.Module):
    """As of version 2 the state holds the logarithm of the scale; older states are migrated, as torch suggests."""

    _version = 2

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)
        self.log_scale = torch.nn.Parameter(torch.tensor(0.5))

    def _load_from_state_dict(self, state, prefix, metadata, *more):
        if metadata.get("version", 1) < 2:
            state[prefix + "log_scale"] = state[prefix + "log_scale"].clamp(min=1e-6).log()
        super()._load_from_state_dict(state, prefix, metadata, *more)

    def forward(self, x):
        return self.linear(x) * self.log_scale.exp()


@pytest.mark.parametrize("is_factory", [False, True])
def test_modules_learn_the_version_of_their_state(frame, one_worker, tmp_path, is_factory):
    model = Versioned()
    estimator = TorchEstimator(
        model=Versioned if is_factory else model,
        optimizer=(lambda model: torch.optim.SGD(model.parameters(), lr=0.0))
        if is_factory
        else torch.optim.SGD(model.parameters(), lr=0.0),
        loss=F.mse_loss,
        feature_cols=["x"],
        label_cols=["y"],
        batch_size=8,
        epochs=1,
        store=tmp_path / "store",
        run_id="run",
        backend=one_worker,
        verbose=0,
    )
    fitted = estimator.fit(frame)
    again = estimator.copy({estimator.epochs: 2}).fit(frame)  # from its checkpoint
    fitted.save(str(tmp_path / "model"))
    for each in (fitted, again, TorchModel.load(str(tmp_path / "model"))):
        assert each.getModel().log_scale.item() == 0.5


def test_the_state_of_a_scheduler_keeps_its_counter(tmp_path):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3])
    torch.save(on_cpu(scheduler.state_dict()), tmp_path / "state")
    scheduler.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    for _ in range(4):
        optimizer.step()
        scheduler.step()
    assert scheduler.get_last_lr() == [pytest.approx(0.01)]
    with pytest.raises(DataError, match=r"NumPy array of shape \(3,\): make it a tensor"):
        on_cpu({"extra": np.ones(3)})


def test_numbers_of_numpy_lists_and_tuples_come_back_from_a_checkpoint():
    state = {"extra": [np.array(2.0), np.float32(0.5), (1, torch.ones(2, 3).shape)]}
    found = unpacked(packed(on_cpu(state)))
    assert found == {"extra": [2.0, 0.5, (1, torch.Size([2, 3]))]}
    assert [type(one) for one in found["extra"]] == [float, float, tuple]
    assert type(found["extra"][2][1]) is torch.Size


@pytest.mark.parametrize("value", [Place(torch.ones(2), 3), torch.ones(2, 2).max(0), Kept([1, 2])])
def test_a_tuple_or_list_of_another_kind_is_refused_rather_than_written_and_not_read(value):
    with pytest.raises(DataError, match=rf"holds a {type(value).__qualname__}: make it a dict"):
        on_cpu({"extra": [value]})


@pytest.mark.parametrize("array", [np.array([2.0]), np.array([[1]]), np.array([])])
def test_an_array_with_dimensions_is_not_made_a_number(array):
    with pytest.raises(DataError, match=r"NumPy array of shape \("):
        on_cpu({"extra": array})
