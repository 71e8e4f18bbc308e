"""``training_step`` is tried in the driver: classes stored as floats, as by StringIndexer, become int64 if needed."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import cloudpickle
import pytest
import torch
import torch.nn.functional as F

from hvd_cluster.errors import WorkerFailedError
from hvd_cluster.estimators import LightningEstimator

if find_spec("lightning") is None:
    pytest.skip("needs lightning", allow_module_level=True)

import lightning.pytorch as pl

from hvd_cluster.estimators.lightning.step_trial import whole_labels

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 3)
        self.calls = 0

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        self.calls += 1
        loss = F.cross_entropy(self(batch["x"]), batch["y"])
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Regression(Classifier):
    def training_step(self, batch):
        return F.mse_loss(self(batch["x"]).sum(1), batch["y"])


class Both(Classifier):
    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch["x"]), batch["y"]) + F.binary_cross_entropy(torch.rand(4), batch["z"])


class NeedsTrainer(Classifier):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) / self.trainer.max_epochs


def rows(**more):
    return {"x": torch.rand(4, 4), "y": torch.tensor([0.0, 1.0, 2.0, 0.0], dtype=torch.float64), **more}


def test_only_labels_that_need_it_become_int64():
    module = Classifier()
    assert whole_labels(module, rows(), "float32", ["y"]) == ("y",)
    assert module.calls == 0
    assert whole_labels(Both(), rows(z=torch.ones(4)), "float32", ["y", "z"]) == ("y",)
    assert whole_labels(Regression(), rows(), "float32", ["y"]) == ()
    assert whole_labels(NeedsTrainer(), rows(), "float32", ["y"]) == ()
    assert whole_labels(Classifier(), rows(y=torch.full((4,), 0.5)), "float32", ["y"]) == ()


def test_doubles_that_are_classes_are_trained_on_and_others_named(frame, one_worker):
    params = {"feature_cols": ["x"], "label_cols": ["y"], "batch_size": 8, "epochs": 1, "verbose": 0}
    estimator = LightningEstimator(model=Classifier(), backend=one_worker, max_restarts=0, **params)
    classes = frame.assign(y=(frame.y > 0).astype("float64"))
    assert estimator.fit(classes).getHistory()[0]["train"]["loss"] > 0
    classes.loc[150:, "y"] = 0.5
    with pytest.raises(WorkerFailedError, match=r"label column 'y' holds 0\.5: training_step\(\) takes whole numbers"):
        estimator.fit(classes)
