"""LightningEstimator whose ranks hold and save parts: checkpoints in shards, and layers of the meta device."""

from __future__ import annotations

import io
import sys
from importlib.util import find_spec
from pathlib import Path

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hvd_cluster.data.store import Store
from hvd_cluster.errors import DataError, WorkerFailedError
from hvd_cluster.estimators import FSDP2, LightningEstimator, ModelFactory
from hvd_cluster.estimators.run.checkpoint import Checkpoint
from hvd_cluster.estimators.run.run_files import RunFiles
from hvd_cluster.estimators.torch.strategies.shards import Shards

if find_spec("lightning") is None:
    pytest.skip("needs lightning", allow_module_level=True)

import lightning.pytorch as pl

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.needs("torch>=2.6")

DIVIDED = FSDP2(min_num_params=20)


class Net(pl.LightningModule):
    def __init__(self, layer=nn.Linear):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.last = layer(4, 16), nn.Linear(16, 1)
        self.register_buffer("offsets", torch.arange(16.0) / 16, persistent=False)

    def forward(self, x):
        return self.last(torch.tanh(self.layer(x) + self.offsets))

    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self(batch["x"]).flatten(), batch["y"])
        self.log("train_loss", loss, on_epoch=True, on_step=False, batch_size=len(batch["y"]))
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def fit(frame, backend, sharding, model=None, **params):
    given = {
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "batch_size": 8,
        "epochs": 2,
        "random_seed": 5,
        "verbose": 0,
        **params,
    }
    return LightningEstimator(model=model or Net(), backend=backend, sharding=sharding, **given).fit(frame)


def losses(model):
    return [record["train"]["loss"] for record in model.getHistory()]


def assert_same(model, expected):
    torch.testing.assert_close(model.getModel().state_dict(), expected.getModel().state_dict(), atol=1e-6, rtol=0)
    torch.testing.assert_close(losses(model), losses(expected), atol=1e-6, rtol=0)


def tensors(nest):
    if isinstance(nest, dict):
        nest = list(nest.values())
    if isinstance(nest, (list, tuple)):
        return [tensor for one in nest for tensor in tensors(one)]
    return [nest] if isinstance(nest, torch.Tensor) else []


@pytest.mark.parametrize("sharding", [DIVIDED, "zero1"])
def test_each_rank_writes_its_part_and_a_fit_without_sharding_continues(frame, two_workers, tmp_path, sharding):
    params = {"store": str(tmp_path), "run_id": "r"}
    fit(frame, two_workers, sharding, epochs=1, **params)
    (folder,) = (tmp_path / "runs" / "r" / "shards").iterdir()
    assert {path.name for path in folder.iterdir()} == {".metadata", "__0_0.distcp", "__1_0.distcp"}
    state = Checkpoint.load(RunFiles(Store.create(tmp_path), "r")).state
    lightning = torch.load(io.BytesIO(state["lightning"].numpy().tobytes()), weights_only=False)
    assert lightning["state_dict"] == {}
    assert tensors(lightning["optimizer_states"]) == []
    stored = Shards(Store.create(tmp_path), "r", state["shards"]).shapes()
    assert stored["model.layer.weight"][0] == stored["optimizer.0.exp_avg"][0] == (16, 4)
    assert_same(fit(frame, two_workers, "none", **params), fit(frame, two_workers, "none"))


def test_a_run_without_sharding_does_not_continue_with_it(frame, two_workers, tmp_path):
    params = {"store": str(tmp_path), "run_id": "r", "epochs": 1}
    fit(frame, two_workers, "none", **params)
    with pytest.raises(DataError, match="has a checkpoint of a fit without sharding"):
        fit(frame, two_workers, "zero1", **params)


class Stop(pl.Callback):
    """Ends each worker once, in the middle of the second epoch."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        marker = Path(self.folder) / f"rank-{trainer.global_rank}"
        if trainer.current_epoch == 1 and batch_idx == 4 and not marker.exists():
            marker.touch()
            raise ValueError("stopped by the test")


class Two(Net):
    """Trains each layer with an optimizer of its own."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()
        return loss

    def configure_optimizers(self):
        adam = torch.optim.Adam(self.layer.parameters(), lr=0.01)
        return [adam, torch.optim.RMSprop(self.last.parameters(), lr=0.01, momentum=0.5)]


@pytest.mark.parametrize(("sharding", "later"), [(DIVIDED, DIVIDED), ("zero1", "zero1"), ("zero1", "none")])
def test_a_run_with_two_optimizers_continues_in_the_middle_of_an_epoch(frame, two_workers, tmp_path, sharding, later):
    params = {"store": str(tmp_path / "work"), "run_id": "r", "checkpoint_every_steps": 2}
    params["callbacks"] = [Stop(str(tmp_path))]
    with pytest.raises(WorkerFailedError, match="stopped by the test"):
        fit(frame, two_workers, sharding, Two(), **params)
    assert_same(fit(frame, two_workers, later, Two(), **params), fit(frame, two_workers, "none", Two()))


def test_the_best_weights_are_returned(frame, two_workers, tmp_path):
    best = pl.callbacks.ModelCheckpoint(monitor="train_loss", mode="max")  # of the first epoch
    model = fit(frame, two_workers, DIVIDED, callbacks=[best], store=str(tmp_path), run_id="r")
    expected = fit(frame, two_workers, "none", epochs=1).getModel().state_dict()
    torch.testing.assert_close(model.getModel().state_dict(), expected, atol=1e-6, rtol=0)
    assert len(list((tmp_path / "runs" / "r" / "shards").iterdir())) == 1  # the last checkpoint's


class OnFirstRank(nn.Linear):
    """Refuses to get values on another rank than the first."""

    def reset_parameters(self):
        import hvd_cluster.torch as hvd

        if not self.weight.is_meta and hvd.is_initialized() and hvd.rank():
            raise AssertionError(f"rank {hvd.rank()} holds the whole layer")
        super().reset_parameters()


def on_meta(layer, is_lightning):
    with torch.device("meta"):
        net = Net(layer) if is_lightning else nn.Sequential(layer(4, 16), nn.Tanh(), nn.Linear(16, 1))
    if is_lightning:
        net.register_buffer("offsets", torch.arange(16.0) / 16, persistent=False)
    return net


def adamw(net):
    return torch.optim.AdamW(net.parameters(), lr=0.01)


@pytest.mark.parametrize("is_lightning", [True, False], ids=["a LightningModule", "a plain net"])
def test_only_the_first_rank_holds_a_model_of_the_meta_device(frame, two_workers, tmp_path, is_lightning):
    params = {} if is_lightning else {"optimizer": adamw, "loss": F.mse_loss}
    params |= {"store": str(tmp_path), "run_id": "r"}
    for epochs in (1, 2):  # the second fit continues the first one
        model = fit(
            frame, two_workers, DIVIDED, ModelFactory(on_meta, OnFirstRank, is_lightning), epochs=epochs, **params
        )
    assert_same(
        model,
        fit(frame, two_workers, "none", ModelFactory(on_meta, nn.Linear, is_lightning), **{**params, "run_id": "n"}),
    )
    assert model.getModelFactory() is not None


class Counting(nn.Linear):
    """Counts its calls that keep activations, or compute them again."""

    calls = 0

    def forward(self, x):
        self.calls += torch.is_grad_enabled()
        return super().forward(x)


class Count(pl.Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        pl_module.log("calls", float(pl_module.layer.inner[0].calls))


class Inner(nn.Module):
    """A wrapped module in one that the step calls."""

    def __init__(self, *shape):
        super().__init__()
        self.inner = nn.Sequential(Counting(*shape), nn.Tanh())

    def forward(self, x):
        return self.inner(x)


def test_activations_are_computed_again(frame, two_workers):
    again = FSDP2(wrap=Counting, activation_checkpointing=True)
    models = [
        fit(frame, two_workers, each, Net(Inner), callbacks=[Count()], epochs=1)
        for each in ("none", FSDP2(wrap=Counting), again)
    ]
    plain, divided, computed = (model.getHistory()[0]["logged"]["calls"] for model in models)
    assert computed == 2 * plain == 2 * divided
    assert_same(models[2], models[0])


class Half(Net):
    """Asserts the dtype in which the workers compute."""

    def training_step(self, batch, batch_idx):
        assert self.layer(batch["x"]).dtype == torch.bfloat16
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("sharding", [DIVIDED, "zero1"])
def test_layers_compute_in_bfloat16_and_weights_stay_in_float32(frame, two_workers, sharding):
    half = {"trainer_args": {"precision": "bf16-mixed"}}
    model, expected = fit(frame, two_workers, sharding, Half(), **half), fit(frame, two_workers, "none")
    assert {one.dtype for one in model.getModel().parameters()} == {torch.float32}
    assert losses(model) != losses(expected)
    assert losses(model) == pytest.approx(losses(expected), rel=0.05)
