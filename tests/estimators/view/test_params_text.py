from __future__ import annotations

import functools

import torch

from hvd_cluster.estimators import KerasEstimator, TorchEstimator, TorchModel
from hvd_cluster.estimators.view.params_text import text_of


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


class Scale:
    def __call__(self, batch):
        return batch


def test_functions_and_objects_are_shown_without_addresses():
    choose = lambda out: (out.logits, "a, b")  # noqa: E731
    assert text_of("output_fn", choose) == 'lambda out: (out.logits, "a, b")'
    both = [lambda one: one, lambda other: other]
    assert text_of("loss", both[:1]) == "[both = [lambda one: one, lambda other: other]]"
    partial = functools.partial(torch.nn.functional.mse_loss, reduction="sum")
    assert text_of("loss", [partial, Scale()]) == "[partial(mse_loss, reduction='sum'), Scale]"
    assert text_of("metrics", {"right": Scale(), "sizes": (1,)}) == "{'right': Scale, 'sizes': (1,)}"
    made = eval("lambda x: x")
    assert text_of("output_fn", made).startswith("lambda in line 1 of ")
    assert text_of("loss", torch.nn.MSELoss()) == "MSELoss()"
