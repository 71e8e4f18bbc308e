"""Fits whose workers hold parts of the model, on Spark, on Ray and with a store on S3, against fits without it."""

from __future__ import annotations

import os
import sys

import cloudpickle
import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hvd_cluster.data.store import Store
from hvd_cluster.estimators import FSDP2, LocalBackend, TorchEstimator

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

DIVIDED = FSDP2(min_num_params=20)


@pytest.fixture(scope="module")
def rows():
    x = np.random.default_rng(0).normal(size=(128, 5)).astype("float32")
    return pd.DataFrame({"x": x.tolist(), "y": (x @ np.arange(5)).astype("float32")})


def fit(data, store, sharding, **params):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    given = {"batch_size": 8, "epochs": 2, "scale_lr": False, "random_seed": 5, "verbose": 0, **params}
    return TorchEstimator(
        model=net,
        optimizer=torch.optim.AdamW(net.parameters(), lr=0.01),
        loss=F.mse_loss,
        feature_cols=["x"],
        label_cols=["y"],
        sharding=sharding,
        store=str(store),
        **given,
    ).fit(data)


def assert_same(model, expected):
    losses, wanted = ([record["train"]["loss"] for record in one.getHistory()] for one in (model, expected))
    assert losses == pytest.approx(wanted, rel=1e-6)
    torch.testing.assert_close(model.getModel().state_dict(), expected.getModel().state_dict(), atol=1e-6, rtol=0)


@pytest.mark.spark("local", "local-cluster", "connect")
def test_spark_workers_hold_parts_of_the_model(spark, rows, tmp_path):
    data = spark.createDataFrame(rows).coalesce(1)
    model = fit(data, tmp_path / "divided", DIVIDED, num_proc=2)
    assert_same(model, fit(data, tmp_path / "whole", "none", num_proc=2))
    assert len(list((tmp_path / "divided").rglob("*.distcp"))) == 2
    assert model.transform(data).count() == 128


@pytest.mark.parametrize("sharding", [DIVIDED, "zero1"])
def test_ray_workers_hold_parts_of_the_model(ray_cluster, rows, tmp_path, sharding):
    import ray

    data = ray.data.from_pandas(rows)
    model = fit(data, tmp_path / "divided", sharding, num_proc=2)
    assert_same(model, fit(data, tmp_path / "whole", "none", num_proc=2))
    assert len(list((tmp_path / "divided").rglob("*.distcp"))) == 2
    assert model.transform(data).count() == 128


def test_a_run_on_s3_continues_on_another_number_of_workers(bucket, rows, tmp_path):
    aws = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}

    def run(store, sharding, workers, **params):
        backend = LocalBackend(workers, env=aws, verbose=0)
        return fit(rows, store, sharding, backend=backend, run_id="r", batch_size=16 // workers, **params)

    for store, sharding in ((bucket, DIVIDED), (tmp_path, "none")):
        run(store, sharding, 2, epochs=1)
    assert len([name for name in Store.create(bucket).list(bucket, recursive=True) if name.endswith(".distcp")]) == 2
    assert_same(run(bucket, DIVIDED, 1), run(tmp_path, "none", 1))
