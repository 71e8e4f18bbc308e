"""Params that exclude sharding are refused in the driver, before any rows are written."""

from __future__ import annotations

import warnings

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hvd_cluster.data.store import Store
from hvd_cluster.estimators import FSDP2, LocalBackend, PowerSGD, TorchEstimator
from hvd_cluster.estimators.torch.strategies.checks import wrong_sharding
from hvd_cluster.torch import Compression


@pytest.fixture
def frame():
    x = np.random.default_rng(0).normal(size=(16, 3)).astype("float32")
    return pd.DataFrame({"x": list(x), "y": x[:, 0]})


def estimator(store, net=None, **params):
    net = net or nn.Linear(3, 1)
    given = {"feature_cols": ["x"], "label_cols": ["y"], "loss": F.mse_loss, "verbose": 0, **params}
    optimizer = given.pop("optimizer", torch.optim.SGD)(net.parameters(), lr=0.1)
    return TorchEstimator(model=net, optimizer=optimizer, backend=LocalBackend(1), store=store, **given)


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 4, sparse=True)
        self.last = nn.Linear(3, 1)

    def forward(self, x):
        return self.last(x) + self.table(x.long().clamp(0, 9)).mean()


class WithParameter(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.last = nn.Linear(3, 1)
        self.own = nn.Parameter(value)

    def forward(self, x):
        return self.last(x) * self.own.abs().sum()


def mixed():
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1).double())


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"sharding": "fsdp2", "torch_backend": "gloo"}, "sharding needs torch_backend='hvd', and .* leave it out"),
        ({"sharding": "zero1", "torch_backend": "gloo"}, "sharding needs torch_backend='hvd', and .* leave it out"),
        ({"sharding": "fsdp2", "gradient_compression": Compression.fp16}, "gradient_compression .*'zero1'"),
        ({"sharding": "fsdp2", "net": Words()}, "make table with sparse=False"),
        ({"communication": PowerSGD(), "net": Words()}, r"PowerSGD\(...\) .* make table with sparse=False"),
        ({"sharding": FSDP2(wrap="Block")}, "names Block, and the model has Linear"),
        ({"sharding": FSDP2(activation_checkpointing=True)}, "a min_num_params below 1000000"),
        ({"sharding": "zero1", "net": mixed()}, "one dtype, and the model has float32, float64: use .*FSDP2.wrap="),
        ({"sharding": "fsdp2", "net": mixed()}, "of the model together, and they are float32, float64: use .*FSDP2.wr"),
        ({"sharding": FSDP2(wrap="Sequential"), "net": nn.Sequential(mixed())}, "parameters of 0 together"),
        ({"sharding": "fsdp2", "optimizer": torch.optim.Rprop}, "Rprop .* use sharding='zero1'"),
        ({"sharding": "fsdp2", "net": WithParameter(torch.tensor(1.0))}, r"give own the shape \(1,\)"),
        ({"sharding": "fsdp2", "net": WithParameter(torch.ones(2) * 1j)}, r"own is complex: .*view_as_complex\(\)"),
    ],
)
def test_wrong_combinations_name_the_remedy(frame, tmp_path, params, text):
    with pytest.raises(ValueError, match=text):
        estimator(str(tmp_path), **params).fit(frame)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["Adafactor", "Muon"])
def test_optimizers_that_need_whole_matrices_name_the_remedy(frame, tmp_path, name):
    if not hasattr(torch.optim, name):
        pytest.skip(f"torch.optim.{name}: this torch lacks it")
    net = nn.Linear(3, 1, bias=False)
    with pytest.raises(ValueError, match=f"{name} .* use sharding='zero1'"):
        estimator(str(tmp_path), net, sharding="fsdp2", optimizer=getattr(torch.optim, name)).fit(frame)
    assert list(tmp_path.iterdir()) == []


def test_frozen_complex_parameters_are_allowed():
    net = WithParameter(torch.ones(2) * 1j).requires_grad_(False)
    params = {"sharding": FSDP2(min_num_params=1)}
    wrong = wrong_sharding(params.get, net, lambda _: ("",))
    assert not any("complex:" in text for text in wrong)


@pytest.mark.needs("torch>=2.6")
@pytest.mark.parametrize(
    ("config", "outer_names"),
    [(FSDP2(wrap=nn.Linear), ("",)), (FSDP2(min_num_params=1), ("",)), (FSDP2(), ("0", "1"))],
    ids=["by class", "by size", "called from outside"],
)
def test_modules_of_two_dtypes_are_divided_apart(config, outer_names):
    params = {"sharding": config}
    assert wrong_sharding(params.get, mixed(), lambda _: outer_names) == []


@pytest.mark.skipif(torch.__version__ < "2.8", reason="torch 2.8 first divides frozen parameters of another dtype")
def test_frozen_parameters_may_have_another_dtype():
    net = mixed()
    net[1].requires_grad_(False)
    params = {"sharding": FSDP2()}
    assert wrong_sharding(params.get, net, lambda _: ("",)) == []


def test_torchscript_cannot_be_divided(frame, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer versions of torch call TorchScript deprecated
        net = torch.jit.script(nn.Linear(3, 1))
    with pytest.raises(ValueError, match="give the module that was scripted"):
        estimator(str(tmp_path), net, sharding="fsdp2").fit(frame)


@pytest.mark.needs("torch>=2.6")
def test_a_store_that_keeps_no_runs_is_refused(frame, tmp_path):
    with pytest.raises(ValueError, match=r"keeps runs \(save_runs=True\)"):
        estimator(Store.create(tmp_path, save_runs=False), sharding="zero1").fit(frame)
    assert list(tmp_path.iterdir()) == []


def test_other_names_are_refused():
    with pytest.raises(ValueError, match=r"'zero1', 'fsdp2' or FSDP2\(...\)"):
        TorchEstimator(sharding="zero3")


def test_the_name_stands_for_the_defaults():
    assert TorchEstimator(sharding="fsdp2").getSharding() == FSDP2()
