"""A fit whose store is on S3: data, checkpoints and logs."""

from __future__ import annotations

import os

import cloudpickle
import pytest
import survivors
import torch.nn.functional as F
from survivors import KillingLoss, estimator, what_was_learned

from hvd_cluster.data.store import Store
from hvd_cluster.estimators import LocalBackend

cloudpickle.register_pickle_by_value(survivors)


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
