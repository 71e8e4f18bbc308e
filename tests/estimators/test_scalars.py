from __future__ import annotations

import pytest

from hvd_cluster.estimators import TorchEstimator
from hvd_cluster.estimators.scalars import without_tensorflow


def test_tensorboard_reads_the_losses_of_a_fit(frame, one_worker, tmp_path):
    import torch
    import torch.nn.functional as F

    with without_tensorflow():
        accumulator = pytest.importorskip(
            "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is not installed"
        )
    net = torch.nn.Linear(4, 1)
    given = {"loss": F.mse_loss, "feature_cols": ["x"], "label_cols": ["y"], "epochs": 3, "verbose": 0}
    fit = TorchEstimator(model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.05), validation=0.2, **given)
    model = fit.setBackend(one_worker).setStore(tmp_path).setRunId("r").fit(frame)
    assert not one_worker.run(lambda: "tensorflow" in __import__("sys").modules)[0]
    events = accumulator.EventAccumulator(str(tmp_path / "runs" / "r" / "logs"))
    with without_tensorflow():
        events.Reload()
    for part in ("train", "validation"):
        logged = [(event.step, event.value) for event in events.Scalars(f"loss/{part}")]
        assert logged == [(r["epoch"], pytest.approx(r[part]["loss"], rel=1e-5)) for r in model.getHistory()]
