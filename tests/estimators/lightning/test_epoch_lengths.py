"""How many epochs a Trainer makes, and how many steps each of them has."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import cloudpickle
import pytest
import torch
import torch.nn.functional as F

from hvd_cluster.estimators import LightningEstimator

if find_spec("lightning") is None:
    pytest.skip("needs lightning", allow_module_level=True)

import lightning.pytorch as pl

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Counting(pl.LightningModule):
    """Logs the number of steps of each epoch, and the sum of the labels of its rows."""

    def __init__(self):
        super().__init__()
        self.layer, self.steps, self.sum = torch.nn.Linear(1, 1), 0, 0.0

    def forward(self, a):
        return self.layer(a.reshape(-1, 1))

    def training_step(self, batch, batch_idx):
        self.steps, self.sum = self.steps + 1, self.sum + float(batch["y"].sum())
        return F.mse_loss(self(batch["a"]).flatten(), batch["y"])

    def on_train_epoch_end(self):
        self.log_dict({"steps": float(self.steps), "sum": self.sum})
        self.steps, self.sum = 0, 0.0

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fitted(frame, backend, **params):
    fit = LightningEstimator(
        model=Counting(),
        feature_cols=["a"],
        label_cols=["y"],
        batch_size=8,
        random_seed=1,
        verbose=0,
        backend=backend,
        **params,
    )
    return [record["logged"] for record in fit.fit(frame).getHistory()]


def test_an_epoch_may_be_longer_than_a_pass_over_the_rows(frame, one_worker):
    from hvd_cluster.estimators.lightning.datamodule import PetastormDataModule

    given = {"train_steps_per_epoch": 10, "epochs": 2}
    ours = fitted(frame[:32], one_worker, **given)
    assert [record["steps"] for record in ours] == [10, 10]
    assert fitted(frame[:32], one_worker, data_module=PetastormDataModule, **given) == ours


def test_max_epochs_of_the_trainer_replace_epochs_in_a_resumed_run_too(frame, one_worker, tmp_path):
    for epochs in (2, 3):
        given = {"trainer_args": {"max_epochs": epochs}, "store": tmp_path, "run_id": "one", "logger": False}
        assert len(fitted(frame[:32], one_worker, epochs=1, **given)) == epochs


@pytest.mark.parametrize("limits", [{"max_epochs": -1}, {"max_epochs": None}])
def test_a_trainer_may_have_another_limit_than_epochs(frame, one_worker, limits):
    assert len(fitted(frame[:32], one_worker, trainer_args={"max_steps": 8, **limits})) == 2
