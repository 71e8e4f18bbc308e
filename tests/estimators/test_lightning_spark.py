"""LightningEstimator on Spark: rows from a DataFrame, workers in barrier tasks, scores back in a DataFrame."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import cloudpickle
import numpy as np
import pandas as pd
import pytest
import survivors
import torch
import torch.nn.functional as F

from hvd_cluster.estimators import LightningEstimator

if find_spec("lightning") is None:
    pytest.skip("needs lightning", allow_module_level=True)

import lightning.pytorch as pl

cloudpickle.register_pickle_by_value(sys.modules[__name__])

cloudpickle.register_pickle_by_value(survivors)

pytestmark = [pytest.mark.spark("local", "connect"), pytest.mark.timeout(300)]


class Net(pl.LightningModule):
    """Linear in the column x."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3, 1)

    def forward(self, x):
        return self.layer(x)

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self(batch["x"]).flatten(), batch["y"])

    def validation_step(self, batch, batch_idx):
        loss = F.mse_loss(self(batch["x"]).flatten(), batch["y"])
        self.log("val_loss", loss, sync_dist=True, batch_size=len(batch["y"]))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.05)


def rows():
    x = np.random.default_rng(1).normal(size=(96, 3)).astype("float32")
    return pd.DataFrame({"id": np.arange(96), "x": x.tolist(), "y": x @ [1.0, 2.0, -1.0]})


@pytest.mark.parametrize(
    "with_store", [pytest.param(True, marks=pytest.mark.slow), False], ids=["through a store", "without one"]
)
def test_a_spark_frame_is_fitted_and_scored(spark, tmp_path, with_store):
    data = spark.createDataFrame(rows()).repartition(3)
    keep = pl.callbacks.ModelCheckpoint(monitor="val_loss", filename="best")
    model = LightningEstimator(
        model=Net(),
        feature_cols=["x"],
        label_cols=["y"],
        validation=0.2,
        batch_size=8,
        epochs=3,
        num_proc=2,
        verbose=0,
        store=str(tmp_path) if with_store else None,
        callbacks=[keep],
    ).fit(data)
    losses = [record["train"]["loss"] for record in model.getHistory()]
    assert losses[-1] < losses[0]
    assert len(model.getHistory()[0]["samples_per_s"]) == len(model.getHistory()[0]["time_share"]) == 2
    scored = model.transform(data).orderBy("id").toPandas()
    with torch.no_grad():
        expected = model.getModel()(torch.tensor(np.stack(rows()["x"].to_list()), dtype=torch.float32))
    assert np.allclose(scored["y__output"], expected.flatten(), atol=1e-5)
    if with_store:
        run = tmp_path / "runs" / model.getRunId()
        assert {"checkpoint", "best.ckpt"} <= {path.name for path in run.iterdir()}


class Dies(pl.Callback):
    """Kills a process in the second epoch, once."""

    def __init__(self, mark, victim):
        self.mark, self.victim = mark, victim

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if (trainer.global_rank, trainer.current_epoch, batch_idx) == (1, 1, 2) and not self.mark.exists():
            self.mark.touch()
            survivors.kill(self.victim)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.spark("local-cluster", "local", "connect")
@pytest.mark.parametrize("victim", ["worker", "task", "executor"])
def test_a_death_in_mid_epoch_changes_nothing(spark, spark_master, tmp_path, victim, caplog):
    if victim == "executor" and spark_master != "local-cluster":
        pytest.skip("the executor is the driver's own JVM")
    data = spark.createDataFrame(rows())  # without a shuffle, which would reorder the rows in each fit

    def fitted(*callbacks):
        keep = pl.callbacks.ModelCheckpoint(monitor="val_loss")
        stop = pl.callbacks.EarlyStopping("val_loss", patience=2, min_delta=1e9)
        given = {"validation": 0.2, "batch_size": 8, "epochs": 6, "random_seed": 5, "verbose": 0}
        # Without a store, a killed task leaves the rows that it received on its disk.
        given |= {"num_proc": 2, "store": str(tmp_path / f"work-{len(callbacks)}")}
        return LightningEstimator(
            model=Net(), feature_cols=["x"], label_cols=["y"], callbacks=[keep, stop, *callbacks], **given
        ).fit(data)

    undisturbed, disturbed = fitted(), fitted(Dies(tmp_path / "killed", victim))
    assert (tmp_path / "killed").exists()
    assert [text for text in caplog.messages if "(1 of at most 3 times)" in text]
    assert torch.equal(disturbed.getModel().layer.weight, undisturbed.getModel().layer.weight)
    assert len(disturbed.getHistory()) == len(undisturbed.getHistory()) == 3
