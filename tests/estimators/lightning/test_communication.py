"""LightningEstimator whose workers train apart in rounds, or exchange approximate gradients."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hvd_cluster.errors import WorkerFailedError
from hvd_cluster.estimators import DiLoCo, LightningEstimator, LocalBackend, LocalSGD, PowerSGD, TorchEstimator

if find_spec("lightning") is None:
    pytest.skip("needs lightning", allow_module_level=True)

import lightning.pytorch as pl

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.needs("torch>=2.6")

LOW_RANK = PowerSGD(rank=1, start_step=2, min_compression_rate=1)


def fit(frame, backend, communication, estimator=LightningEstimator, **params):
    given = {
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "batch_size": 8,
        "epochs": 2,
        "scale_lr": False,
        "random_seed": 5,
        "verbose": 0,
        **params,
    }
    return estimator(backend=backend, communication=communication, **given).fit(frame)


def assert_same(model, expected, atol=1e-6):
    torch.testing.assert_close(model.getModel().state_dict(), expected.getModel().state_dict(), atol=atol, rtol=0)
    torch.testing.assert_close(losses(model), losses(expected), atol=1e-5, rtol=0)


def losses(model):
    return [record[part]["loss"] for record in model.getHistory() for part in ("train", "validation") if part in record]


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x):
        return self.layers(x)

    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self(batch["x"]).flatten(), batch["y"])
        self.log("train_loss", loss, on_epoch=True, on_step=False, batch_size=len(batch["y"]))
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


@pytest.mark.parametrize("communication", [LocalSGD(every=3), DiLoCo(every=3), LOW_RANK])
def test_a_net_is_trained_as_by_torch_estimator(frame, two_workers, communication):
    models = []
    for estimator, clip in (
        (LightningEstimator, {"trainer_args": {"gradient_clip_val": 0.5}}),
        (TorchEstimator, {"gradient_clip_norm": 0.5}),
    ):
        net = Net().layers
        params = {"model": net, "optimizer": torch.optim.Adam(net.parameters(), lr=0.01), "loss": F.mse_loss}
        params |= {"validation": 0.25, "backward_passes_per_step": 2, "epochs": 3, **clip}
        models.append(fit(frame, two_workers, communication, estimator, **params))
    assert_same(*models)
    states = [model.getOptimizer().state_dict()["state"] for model in models]
    torch.testing.assert_close(*states, atol=1e-6, rtol=0)


class Stop(pl.Callback):
    """Ends each worker once, in the middle of the second epoch; sees whether the ranks' weights are equal."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        import hvd_cluster.torch as hvd

        marker = Path(self.folder) / f"rank-{hvd.rank()}"
        if trainer.current_epoch == 1 and batch_idx == 2 and not marker.exists():
            marker.touch()
            raise ValueError("stopped by the test")

    def on_train_epoch_end(self, trainer, pl_module):
        import hvd_cluster.torch as hvd

        first, second = hvd.allgather(pl_module.layers[0].weight.detach()[None])
        pl_module.log("equal", float(torch.equal(first, second)))


@pytest.mark.parametrize("communication", [LocalSGD(every=3), DiLoCo(every=3), LOW_RANK])
def test_a_run_that_was_interrupted_ends_with_the_same_weights(frame, two_workers, tmp_path, communication):
    """Adam's state differs between the ranks."""

    def run(store, **params):
        params |= {"model": Net(), "store": str(tmp_path / store), "run_id": "r", "checkpoint_every_steps": 2}
        return fit(frame, two_workers, communication, **params)

    with pytest.raises(WorkerFailedError, match="stopped by the test"):
        run("stopped", callbacks=[Stop(str(tmp_path))])
    continued = run("stopped", callbacks=[Stop(str(tmp_path))])
    assert_same(continued, run("undisturbed"), atol=0)
    assert [record["logged"].get("equal") for record in continued.getHistory()] == [1.0, 1.0]


@pytest.mark.slow
@pytest.mark.parametrize("communication", [DiLoCo(every=3), LOW_RANK])
def test_another_number_of_workers_continues(frame, two_workers, three_workers, tmp_path, communication):
    params = {"store": str(tmp_path), "run_id": "r", "model": Net()}
    fit(frame, two_workers, communication, epochs=1, **params)
    found = losses(fit(frame, three_workers, communication, epochs=4, **params))
    assert len(found) == 4
    assert found[-1] < found[0]


def with_frozen_layer():
    net = Net()
    net.layers[0].requires_grad_(False)
    return net


@pytest.mark.parametrize("communication", [LocalSGD(every=3), LOW_RANK])
def test_the_best_weights_of_a_factory_are_returned(frame, two_workers, communication):
    best = pl.callbacks.ModelCheckpoint(monitor="train_loss", mode="max")  # of the first epoch
    model = fit(frame, two_workers, communication, model=with_frozen_layer, callbacks=[best])
    assert_weights = fit(frame, two_workers, communication, model=with_frozen_layer, epochs=1).getModel().state_dict()
    torch.testing.assert_close(model.getModel().state_dict(), assert_weights, atol=0, rtol=0)


class Manual(Net):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"sharding": "zero1"}, r"DiLoCo\(...\) and sharding exclude each other"),
        ({"trainer_args": {"precision": "16-mixed"}}, "trainer_args with precision='16-mixed' .*: use 'bf16-mixed'"),
        ({"trainer_args": {"strategy": "ddp"}}, "strategy, which does not work with communication: leave one"),
        ({"model": Manual()}, "the module has automatic_optimization = False: leave one of the two out"),
        ({"torch_backend": "gloo"}, "needs torch_backend='hvd'"),
    ],
)
def test_wrong_combinations_are_refused_before_rows_are_written(frame, tmp_path, params, text):
    with pytest.raises(ValueError, match=text):
        fit(frame, LocalBackend(1), DiLoCo(), **{"model": Net(), "store": str(tmp_path), **params})
    assert list(tmp_path.iterdir()) == []
