"""A fit whose store is on S3: data, checkpoints and logs."""

from __future__ import annotations

import os
import sys

import cloudpickle
import numpy as np
import pandas as pd
import pytest
import survivors
import torch
import torch.nn.functional as F
from survivors import KillingLoss, estimator, what_was_learned

from hvd_cluster.data.store import Store
from hvd_cluster.estimators import LocalBackend, TorchEstimator

cloudpickle.register_pickle_by_value(survivors)
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_fit_on_s3_survives_and_leaves_checkpoints_and_logs(frame, two_workers, bucket, tmp_path):
    undisturbed = estimator(F.mse_loss, backend=two_workers, store=tmp_path).fit(frame)
    aws = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    backend = LocalBackend(2, env=aws, verbose=0)
    loss = KillingLoss([tmp_path / "killed"], at=17)
    killed = estimator(loss, backend=backend, store=bucket, run_id="r").fit(frame)
    assert (tmp_path / "killed").exists()
    assert what_was_learned(killed) == what_was_learned(undisturbed)
    names = Store.create(bucket).list(bucket, recursive=True)
    run = [name.removeprefix("bucket/work/runs/r/") for name in names if name.startswith("bucket/work/runs/r/")]
    assert {"checkpoint", "checkpoint.best"} <= set(run)
    assert [name for name in run if name.startswith("logs/events.out.tfevents")]
    assert not [name for name in names if name.endswith(".parquet")]


def lengths(batch):
    return np.array([[len(text or "")] for text in batch["text"]], np.float32)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_raw_columns_train_from_s3(bucket, tmp_path):
    rows = pd.DataFrame({"text": ["a", "bb", None, "dddd"] * 20, "y": [1.0, 2.0, 0.0, 4.0] * 20})
    aws = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}

    def fitted(store, **backend):
        torch.manual_seed(0)
        net = torch.nn.Linear(1, 1)
        return TorchEstimator(
            model=net,
            optimizer=torch.optim.SGD(net.parameters(), lr=0.01),
            loss=F.mse_loss,
            feature_cols=["text"],
            label_cols=["y"],
            preprocess=lengths,
            batch_size=8,
            epochs=2,
            backend=LocalBackend(2, verbose=0, **backend),
            store=str(store),
            random_seed=1,
            verbose=0,
        ).fit(rows)

    here, there = fitted(tmp_path), fitted(bucket, env=aws)
    assert torch.equal(here.getModel().weight, there.getModel().weight)
    assert here.transform(rows).equals(there.transform(rows))
