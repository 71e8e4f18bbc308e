"""Records, histories and results of fits that do not validate in each epoch."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import cloudpickle
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hvd_cluster.estimators import LightningEstimator

if find_spec("lightning") is None:
    pytest.skip("needs lightning", allow_module_level=True)

import lightning.pytorch as pl

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Net(pl.LightningModule):
    """Logs a number of the validation without a prefix, and another one in the first epoch only."""

    def __init__(self, lr=0.05):
        super().__init__()
        torch.manual_seed(0)
        self.lr, self.layer = lr, torch.nn.Linear(4, 1)

    def forward(self, x):
        return self.layer(x)

    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self(batch["x"]).flatten(), batch["y"])
        self.log("train_loss", loss, on_step=False, on_epoch=True, batch_size=len(batch["y"]))
        if self.current_epoch == 0:
            self.log("first", loss, on_step=False, on_epoch=True, batch_size=len(batch["y"]))
        return loss

    def validation_step(self, batch, batch_idx):
        loss = F.mse_loss(self(batch["x"]).flatten(), batch["y"])
        self.log_dict({"val_loss": loss, "error": loss.sqrt()}, batch_size=len(batch["y"]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Adds(pl.Callback):
    """Puts a number where Lightning keeps the logged ones."""

    def on_train_start(self, trainer, pl_module):
        trainer.callback_metrics["added"] = torch.tensor(3.0)


def fitted(frame, backend, net=None, every=2, epochs=5, **params):
    given = {"feature_cols": ["x"], "label_cols": ["y"], "batch_size": 8, "validation": 0.2, "random_seed": 5}
    given |= {"trainer_args": {"check_val_every_n_epoch": every}, "verbose": 0, "epochs": epochs, **params}
    return LightningEstimator(model=net or Net(), backend=backend, **given).fit(frame)


def test_a_record_has_the_numbers_that_were_logged_in_its_epoch(frame, two_workers):
    heard = []
    model = fitted(frame, two_workers, callbacks=[Adds()], driver_callbacks=[heard.append])
    records = model.getHistory()
    assert heard == records
    assert ["validation" in record for record in records] == [False, True, False, True, False]
    for epoch, record in enumerate(records):
        of_validation = {"val_loss", "error"} if epoch % 2 else set()
        assert set(record["logged"]) == {"train_loss", "added", *of_validation, *(["first"] if epoch == 0 else [])}
        assert record["train"]["loss"] == record["logged"]["train_loss"]
    assert records[1]["validation"]["loss"] > records[3]["validation"]["loss"]
    losses = model.history["validation_loss"]
    assert losses.isna().tolist() == [True, False, True, False, True]
    assert losses[3] == records[3]["validation"]["loss"]
    assert "<svg" in model._repr_html_()


def test_numbers_that_are_logged_where_nothing_is_validated_are_recorded(frame, two_workers):
    class Judges(Net):
        def on_train_epoch_end(self):
            self.log("val_size", self.layer.weight.abs().sum())

    model = fitted(frame, two_workers, Judges(), epochs=2)
    parts = [record["validation"] for record in model.getHistory()]
    assert [sorted(part["all_metrics"][0]) for part in parts] == [["size"], ["size"]]
    assert ["loss" in part for part in parts] == [False, True]


def test_the_best_epoch_is_one_that_was_validated_also_in_a_resumed_run(frame, two_workers, tmp_path):
    def run(name, epochs):
        best = pl.callbacks.ModelCheckpoint(monitor="val_loss", filename="best")
        net = Net(lr=1.1)  # diverges
        given = {"store": str(tmp_path / name), "run_id": "one", "terminate_on_nan": False, "callbacks": [best]}
        return fitted(frame, two_workers, net, epochs=epochs, **given)

    undisturbed = run("a", 6)
    run("b", 3)
    resumed = run("b", 6)
    for model in (undisturbed, resumed):
        losses = model.history["validation_loss"]
        assert losses.isna().tolist() == [True, False] * 3
        assert losses.idxmin() == 1
    assert torch.equal(undisturbed.getModel().layer.weight, resumed.getModel().layer.weight)
    for ours, theirs in zip(resumed.getHistory(), undisturbed.getHistory(), strict=True):
        assert [ours.get(part) for part in ("train", "validation", "logged")] == [
            theirs.get(part) for part in ("train", "validation", "logged")
        ]
    saved = torch.load(tmp_path / "b" / "runs" / "one" / "best.ckpt", weights_only=False)
    assert saved["epoch"] == 1
    assert torch.equal(saved["state_dict"]["layer.weight"], resumed.getModel().layer.weight)


def test_bad_rows_of_a_validation_are_counted_where_there_is_one(frame, one_worker):
    def scaled(batch):
        if (batch["a"] > 2).any():
            raise ValueError("too large")
        return batch["a"][:, None].astype(np.float32)

    net = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    given = {"optimizer": optimizer, "loss": F.mse_loss, "preprocess": scaled, "on_error": "skip", "validation": "v"}
    model = fitted(frame, one_worker, net, feature_cols=["a"], epochs=4, **given)
    bad = int((frame["a"][frame["v"]] > 2).sum())
    assert bad > 0
    found = [record.get("validation_left_out_rows") for record in model.getHistory()]
    assert found == [None, bad, None, bad]
    assert [record["left_out_rows"] for record in model.getHistory()] == [int((frame["a"][~frame["v"]] > 2).sum())] * 4
