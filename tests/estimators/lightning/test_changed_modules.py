"""Lightning fits of modules whose structure is complete only during the fit: the trained module is returned."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import cloudpickle
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hvd_cluster.errors import WorkerFailedError
from hvd_cluster.estimators import LightningEstimator, ModelFactory, TorchModel

if find_spec("lightning") is None:
    pytest.skip("needs lightning", allow_module_level=True)

import lightning.pytorch as pl

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Plain(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self(batch["x"]).flatten(), batch["y"])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


class InConfigureOptimizers(Plain):
    def configure_optimizers(self):
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 1))
        return super().configure_optimizers()


class InFitStart(Plain):
    def on_fit_start(self):
        self.net = torch.nn.Sequential(self.net)


class InTrainStart(Plain):
    def on_train_start(self):
        self.net = torch.nn.Sequential(self.net)


class NeedsTrainer(Plain):
    def setup(self, stage):
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(4, self.trainer.max_epochs), torch.nn.Linear(2, 1))


class LateBuffer(Plain):
    def on_train_epoch_end(self):
        if not hasattr(self, "mean"):
            self.register_buffer("mean", torch.ones(1))


class Attention(Plain):
    def __init__(self):
        super().__init__()
        self.register_buffer("attention", None)

    def forward(self, x):
        self.attention = torch.softmax(x, 1)
        return self.net(x)


class Unpicklable(InTrainStart):
    def on_train_start(self):
        super().on_train_start()
        self.rows = (row for row in range(3))


class LazyInHook(Plain):
    def __init__(self):
        super().__init__()
        self.net = None

    def configure_model(self):
        if self.net is None:
            self.net = torch.nn.LazyLinear(1)


class LazyInSetup(Plain):
    def setup(self, stage):
        self.net = torch.nn.LazyLinear(1)


def fit(frame, backend, model, **params):
    given = {"feature_cols": ["x"], "label_cols": ["y"], "batch_size": 8, "epochs": 2, "verbose": 0, "max_restarts": 0}
    return LightningEstimator(model=model, backend=backend, **{**given, **params}).fit(frame)


def mean_error(model, frame):
    return float(((np.asarray(model.transform(frame)["y__output"]) - frame.y) ** 2).mean())


@pytest.mark.parametrize(
    "module", [InConfigureOptimizers, InFitStart, InTrainStart, NeedsTrainer, LateBuffer, Attention]
)
def test_a_module_that_is_complete_during_the_fit_only_is_returned_trained(frame, two_workers, module, tmp_path):
    model = fit(frame, two_workers, module())
    assert mean_error(model, frame) < 3  # 14 without training; the column a explains 1
    model.save(tmp_path / "model")
    assert TorchModel.load(tmp_path / "model").transform(frame).equals(model.transform(frame))


def test_the_module_of_a_factory_is_too(frame, two_workers):
    assert mean_error(fit(frame, two_workers, ModelFactory(InTrainStart)), frame) < 3


def test_weights_that_stay_pruned_are_returned_with_their_masks(frame, two_workers):
    pruning = pl.callbacks.ModelPruning("l1_unstructured", amount=0.5, make_pruning_permanent=False)
    net = fit(frame, two_workers, Plain(), callbacks=[pruning]).getModel().net
    assert net.weight_mask.sum() < 4
    assert torch.equal(net.weight, net.weight_orig * net.weight_mask)


def test_the_last_weights_are_returned_where_those_of_the_best_file_fit_no_longer(frame, two_workers, tmp_path):
    best = pl.callbacks.ModelCheckpoint(monitor="train_loss", mode="max", save_on_train_epoch_end=True)

    class LateLayer(Plain):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("train_loss", loss, on_epoch=True, on_step=False)
            return loss

        def on_train_epoch_start(self):
            if self.current_epoch == 1:
                self.net = torch.nn.Sequential(self.net)

    assert mean_error(fit(frame, two_workers, LateLayer(), callbacks=[best], store=tmp_path), frame) < 3


def test_what_cannot_be_returned_is_named_in_the_first_epoch(frame, two_workers):
    text = r"other weights than the given one \(net\.0\.weight, net\.0\.bias, .* but model\.rows \(generator\) cannot"
    with pytest.raises(WorkerFailedError, match=text):
        fit(frame, two_workers, Unpicklable(), epochs=500)
    with pytest.raises(WorkerFailedError, match=r"\(attention\), which a fit with sharding='zero1' cannot return"):
        fit(frame, two_workers, Attention(), epochs=500, sharding="zero1")


def test_layers_that_have_no_shape_after_the_hooks_are_named(frame, one_worker):
    for model in (LazyInHook(), LazyInHook):
        with pytest.raises(ValueError, match=r"net\.weight, net\.bias have no shape yet, as in LazyLinear"):
            fit(frame, one_worker, model)
    with pytest.raises(WorkerFailedError, match=r"ValueError: net\.weight, net\.bias have no shape yet"):
        fit(frame, one_worker, LazyInSetup())
