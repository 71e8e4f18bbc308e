"""LightningEstimator on Spark: rows from a DataFrame, workers in barrier tasks, scores back in a DataFrame."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import cloudpickle
import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F

from hvd_cluster.estimators import LightningEstimator

if find_spec("lightning") is None:
    pytest.skip("needs lightning", allow_module_level=True)

import lightning.pytorch as pl

cloudpickle.register_pickle_by_value(sys.modules[__name__])

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
    assert len(model.getHistory()[0]["samples_per_s"]) == 2
    scored = model.transform(data).orderBy("id").toPandas()
    with torch.no_grad():
        expected = model.getModel()(torch.tensor(np.stack(rows()["x"].to_list()), dtype=torch.float32))
    assert np.allclose(scored["y__output"], expected.flatten(), atol=1e-5)
    if with_store:
        run = tmp_path / "runs" / model.getRunId()
        assert {"checkpoint", "best.ckpt"} <= {path.name for path in run.iterdir()}
