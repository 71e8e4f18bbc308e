from __future__ import annotations

import torch

from hvd_cluster.estimators import KerasEstimator, TorchEstimator, TorchModel


def test_a_stage_shows_its_params_without_secrets():
    net = torch.nn.Linear(4, 1)
    estimator = TorchEstimator(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        loss=torch.nn.functional.mse_loss,
        label_cols=["y"],
        epochs=3,
        store="s3://user:word@bucket/work",
    )
    shown = "store='s3://bucket/work', model=Linear, optimizer=SGD, loss=mse_loss, label_cols=['y'], epochs=3"
    assert repr(estimator) == f"TorchEstimator({shown})"
    shown = estimator._repr_html_()
    assert "<b>TorchEstimator</b>" in shown
    assert "<td>epochs</td><td>3</td>" in shown
    assert "word" not in shown
    assert "secret" not in repr(KerasEstimator(backend_env={"TOKEN": "secret"}))
    assert (
        repr(TorchModel(model=net, run_id="r", history=[{}, {}]))
        == "TorchModel(history=2 epochs, model=Linear, run_id='r')"
    )
