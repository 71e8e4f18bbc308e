"""Lightning fits of modules that each worker makes."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import cloudpickle
import pytest
import torch
import torch.nn.functional as F

from hvd_cluster.errors import DataError
from hvd_cluster.estimators import LightningEstimator, ModelFactory, TorchModel

if find_spec("lightning") is None:
    pytest.skip("needs lightning", allow_module_level=True)

import lightning.pytorch as pl

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def table(entries):
    return torch.nn.Embedding(entries, 4).requires_grad_(False)


class Plain(torch.nn.Module):
    """A frozen table of 16 bytes an entry, and a layer behind it."""

    def __init__(self, entries=500_000):
        super().__init__()
        self.base = table(entries)
        self.norm = torch.nn.BatchNorm1d(4)
        self.last = torch.nn.Linear(4, 1)

    def forward(self, x):
        return self.last(self.norm(self.base((x.abs() * 1000).long()).sum(1)))


class Module(pl.LightningModule):
    def __init__(self, entries=500_000, in_hook=False):
        super().__init__()
        self.in_hook = in_hook
        self.net = Plain(entries) if not in_hook else None

    def configure_model(self):
        if self.net is None:
            self.net = Plain()

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self(batch["x"]).flatten(), batch["y"])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.mse_loss(self(batch["x"]).flatten(), batch["y"]), batch_size=len(batch["y"]))

    def configure_optimizers(self):
        return torch.optim.Adam((one for one in self.parameters() if one.requires_grad), lr=0.02)


def fit(frame, backend, model, **params):
    if model is Plain:
        params = {
            "optimizer": lambda model: torch.optim.Adam(model.parameters(), lr=0.02),
            "loss": F.mse_loss,
            **params,
        }
    given = {
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "batch_size": 16,
        "random_seed": 5,
        "verbose": 0,
        "run_id": "r",
        "validation": 0.2,
        **params,
    }
    return LightningEstimator(model=model, backend=backend, **given).fit(frame)


def states_equal(left, right):
    left, right = left.getModel().state_dict(), right.getModel().state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.slow
@pytest.mark.parametrize("factory", [Plain, Module])
@pytest.mark.parametrize("steps", [None, 2])
def test_a_resumed_run_ends_with_the_weights_of_an_undisturbed_one(frame, two_workers, tmp_path, factory, steps):
    params = {"checkpoint_every_steps": steps}
    whole = fit(frame, two_workers, factory, store=tmp_path / "a", epochs=3, **params)
    fit(frame, two_workers, factory, store=tmp_path / "b", epochs=1, **params)
    assert (tmp_path / "b" / "runs" / "r" / "checkpoint").stat().st_size < 100_000
    assert states_equal(whole, fit(frame, two_workers, factory, store=tmp_path / "b", epochs=3, **params))
    whole.write().overwrite().save(tmp_path / "model")
    assert sum(path.stat().st_size for path in (tmp_path / "model").rglob("*") if path.is_file()) < 100_000
    assert TorchModel.load(tmp_path / "model").transform(frame).equals(whole.transform(frame))


def test_the_best_weights_are_stored_without_the_base(frame, two_workers, tmp_path):
    best = pl.callbacks.ModelCheckpoint(monitor="val_loss")
    model = fit(frame, two_workers, Module, epochs=2, callbacks=[best], store=tmp_path)
    assert model.getModel().net.base.weight.shape == (500_000, 4)
    files = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    assert any(path.suffix == ".ckpt" for path in files)
    assert sum(path.stat().st_size for path in files) < 500_000
    resumed = fit(frame, two_workers, Module, epochs=3, callbacks=[best], store=tmp_path)
    assert len(resumed.history) == 3


def test_layers_of_configure_model_are_kept(frame, two_workers):
    model = fit(frame, two_workers, ModelFactory(Module, in_hook=True))
    assert model.getModel().net.last.weight.abs().sum() > 0


def test_a_run_is_not_resumed_with_another_base(frame, one_worker, tmp_path):
    fit(frame, one_worker, Module, store=tmp_path)
    with pytest.raises(DataError, match=r"another model than the factory makes now: 'net.base.weight'"):
        fit(frame, one_worker, ModelFactory(Module, 400_000), store=tmp_path, epochs=2)
