"""LightningEstimator with sharding, against the same fits without."""

from __future__ import annotations

import functools
import sys
import time
from importlib.util import find_spec

import cloudpickle
import pytest
import torch
import torch.nn.functional as F

from hvd_cluster.errors import WorkerFailedError
from hvd_cluster.estimators import FSDP2, LightningEstimator, LocalBackend

if find_spec("lightning") is None:
    pytest.skip("needs lightning", allow_module_level=True)

import lightning.pytorch as pl

cloudpickle.register_pickle_by_value(sys.modules[__name__])

DIVIDED = FSDP2(min_num_params=20)


class Net(pl.LightningModule):
    """Its step calls a layer without forward()."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(5, 16), torch.nn.Linear(16, 16)])
        self.last = torch.nn.Linear(16, 1)

    def forward(self, x, a):
        hidden = torch.cat([x, a.reshape(-1, 1)], dim=1)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return self.last(hidden)

    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self.forward(batch["x"], batch["a"]).flatten(), batch["y"])
        self.log("train_loss", loss, on_epoch=True, on_step=False, batch_size=len(batch["y"]))
        return loss

    def validation_step(self, batch, batch_idx):
        loss = F.mse_loss(self(batch["x"], batch["a"]).flatten(), batch["y"])
        self.log("val_loss", loss, batch_size=len(batch["y"]))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class SlowNet(Net):
    def training_step(self, batch, batch_idx):
        time.sleep(0.03)
        return super().training_step(batch, batch_idx)


def fit(frame, backend, sharding, model=None, **params):
    given = {
        "model": model or Net(),
        "feature_cols": ["x", "a"],
        "label_cols": ["y"],
        "batch_size": 8,
        "epochs": 2,
        "random_seed": 5,
        "verbose": 0,
        "backend": backend,
        "sharding": sharding,
        **params,
    }
    return LightningEstimator(**given).fit(frame)


def assert_same(model, expected):
    torch.testing.assert_close(model.getModel().state_dict(), expected.getModel().state_dict(), atol=1e-6, rtol=0)
    pairs = zip(model.getHistory(), expected.getHistory(), strict=True)
    for ours, theirs in pairs:
        assert ours["logged"] == pytest.approx(theirs["logged"], abs=1e-6)
    assert type(model) is type(expected)


class Share(pl.Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        local = sum(getattr(one, "to_local", lambda one=one: one)().numel() for one in pl_module.parameters())
        pl_module.log("share", local / sum(one.numel() for one in pl_module.parameters()))


@pytest.mark.needs("torch>=2.6")
@pytest.mark.parametrize("sharding", [DIVIDED, "zero1"])
def test_weights_and_logged_numbers_are_those_without_sharding(frame, two_workers, sharding):
    params = {
        "validation": 0.2,
        "backward_passes_per_step": 2,
        "scale_lr": True,
        "trainer_args": {"gradient_clip_val": 0.5},
        "callbacks": [pl.callbacks.ModelCheckpoint(monitor="val_loss")],
    }
    assert_same(fit(frame, two_workers, sharding, **params), fit(frame, two_workers, "none", **params))


class Steps(pl.Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        from hvd_cluster.monitor.step_clock import step_clock  # not a copy of it

        pl_module.log("steps", float(step_clock.num_steps))


@pytest.mark.needs("torch>=2.6")
@pytest.mark.parametrize("sharding", [DIVIDED, "zero1"])
def test_each_update_is_one_step_in_which_computation_is_not_the_optimizer(frame, two_workers, sharding):
    model = fit(frame, two_workers, sharding, SlowNet(), callbacks=[Steps()])
    assert [record["logged"]["steps"] for record in model.getHistory()] == [13.0, 26.0]
    for shares in model.getHistory()[-1]["time_share"]:
        assert sum(shares.values()) == pytest.approx(1.0)
        assert shares["compute"] > shares["optimizer"]


@pytest.mark.needs("torch>=2.6")
def test_a_worker_holds_its_part_of_the_layers(frame, two_workers):
    model = fit(frame, two_workers, DIVIDED, callbacks=[Share()], epochs=1)
    assert 0.4 < model.getHistory()[0]["logged"]["share"] < 0.6


@pytest.mark.needs("torch>=2.6")
@pytest.mark.slow
@pytest.mark.parametrize("sharding", [DIVIDED, "zero1"])
def test_a_run_on_three_workers_continues_on_two(frame, two_workers, three_workers, tmp_path, sharding):
    def run(backend, sharding, store, **params):
        return fit(frame, backend, sharding, store=str(tmp_path / store), run_id="r", scale_lr=True, **params)

    for each, store in (("none", "plain"), (sharding, "divided")):
        run(three_workers, each, store, epochs=1)
    assert_same(run(two_workers, sharding, "divided"), run(two_workers, "none", "plain"))


@pytest.mark.needs("torch>=2.6")
@pytest.mark.parametrize("sharding", [DIVIDED, "zero1"])
def test_a_plain_net_is_trained_with_its_optimizer(frame, two_workers, sharding):
    def net():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    def fitted(sharding):
        model = net()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        params = {"optimizer": optimizer, "loss": F.mse_loss, "feature_cols": ["x"]}
        return fit(frame, two_workers, sharding, model, **params)

    model, expected = fitted(sharding), fitted("none")
    assert_same(model, expected)
    state, wanted = (one.getOptimizer().state_dict()["state"] for one in (model, expected))
    torch.testing.assert_close(state, wanted, atol=1e-6, rtol=0)


class Migrates(torch.nn.Module):
    """As of version 2 the state holds the logarithm of the scale; older states are migrated, as torch suggests."""

    _version = 2

    def __init__(self):
        super().__init__()
        self.register_buffer("log_scale", torch.full((4,), 0.5))

    def _load_from_state_dict(self, state, prefix, metadata, *more):
        if metadata.get("version", 1) < 2:
            state[prefix + "log_scale"] = state[prefix + "log_scale"].clamp(min=1e-6).log()
        super()._load_from_state_dict(state, prefix, metadata, *more)

    def forward(self, x):
        return x * self.log_scale.exp()


class Versioned(Net):
    """Has a version itself, and a layer that has one."""

    _version = 3

    def __init__(self):
        super().__init__()
        self.migrates = Migrates()

    def forward(self, x, a):
        return super().forward(self.migrates(x), a)

    def _load_from_state_dict(self, state, prefix, metadata, *more):
        assert metadata["version"] == 3
        super()._load_from_state_dict(state, prefix, metadata, *more)


class VersionedLayers(torch.nn.Sequential):
    _version = 3

    def _load_from_state_dict(self, state, prefix, metadata, *more):
        assert metadata["version"] == 3
        super()._load_from_state_dict(state, prefix, metadata, *more)


@pytest.mark.needs("torch>=2.6")
@pytest.mark.parametrize("sharding", [DIVIDED, "zero1"])
@pytest.mark.parametrize("is_plain", [True, False], ids=["a plain net", "a LightningModule"])
def test_modules_learn_the_version_of_their_state(frame, two_workers, tmp_path, sharding, is_plain):
    params = {"model": Versioned()}
    if is_plain:
        net = VersionedLayers(Migrates(), torch.nn.Linear(4, 16), torch.nn.Linear(16, 1))
        params = {"model": net, "optimizer": torch.optim.AdamW(net.parameters(), lr=0.01)}
        params |= {"loss": F.mse_loss, "feature_cols": ["x"]}
    params |= {"store": str(tmp_path), "run_id": "r", "validation": 0.2}
    for epochs in (1, 2):  # the second fit continues the first one
        best = pl.callbacks.ModelCheckpoint(monitor="val_loss")
        fitted = fit(frame, two_workers, sharding, epochs=epochs, callbacks=[best], **params).getModel()
        migrates = fitted[0] if is_plain else fitted.migrates
        assert migrates.log_scale.tolist() == [0.5] * 4
    last = fit(frame, two_workers, sharding, epochs=1, **{**params, "run_id": "last"}).getModel()
    assert (last[0] if is_plain else last.migrates).log_scale.tolist() == [0.5] * 4


class Signed(torch.optim.Optimizer):
    """Keeps an option outside of ``defaults``."""

    def __init__(self, params, lr, sign=1.0):
        super().__init__(params, {"lr": lr})
        self.sign = sign

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        for parameter in self.param_groups[0]["params"]:
            parameter += self.sign * self.param_groups[0]["lr"] * parameter.grad
        return loss


class WithOptimizer(Net):
    def __init__(self, cls, **options):
        super().__init__()
        self.make = functools.partial(cls, lr=0.01, **options)

    def configure_optimizers(self):
        return self.make(self.parameters())


@pytest.mark.needs("torch>=2.6")
@pytest.mark.parametrize("sharding", [DIVIDED, "zero1"])
def test_options_of_an_optimizer_outside_of_its_defaults_are_kept(frame, two_workers, sharding):
    fits = [fit(frame, two_workers, each, WithOptimizer(Signed, sign=-1.0)) for each in (sharding, "none")]
    assert_same(*fits)


@pytest.mark.needs("torch>=2.6")
def test_an_optimizer_that_needs_whole_parameters_is_refused(frame, two_workers):
    with pytest.raises(WorkerFailedError, match="Adafactor of torch does not work on divided parameters"):
        fit(frame, two_workers, DIVIDED, WithOptimizer(torch.optim.Adafactor))


class Kinds(pl.Callback):
    """Logs whether all parameters are parts after the validation."""

    def on_validation_epoch_end(self, trainer, pl_module):
        pl_module.log("parts", float(all(hasattr(one, "to_local") for one in pl_module.parameters())))


@pytest.mark.needs("torch>=2.6")
def test_callbacks_see_parts_of_parameters_after_a_validation(frame, two_workers):
    model = fit(frame, two_workers, DIVIDED, validation=0.2, callbacks=[Kinds()])
    assert [record["logged"]["parts"] for record in model.getHistory()] == [1.0, 1.0]


class TwoDtypes(Net):
    """Each layer that the step calls has one dtype."""

    def __init__(self):
        super().__init__()
        self.layers[1].double()

    def forward(self, x, a):
        hidden = self.layers[0](torch.cat([x, a.reshape(-1, 1)], dim=1))
        return self.last(self.layers[1](hidden.double()).float())


@pytest.mark.needs("torch>=2.6")
def test_layers_of_two_dtypes_are_trained_apart(frame, two_workers):
    fits = [fit(frame, two_workers, each, TwoDtypes()) for each in (FSDP2(), "none")]
    assert_same(*fits)


class Mixed(Net):
    def __init__(self):
        super().__init__()
        self.last = torch.nn.Sequential(self.last, torch.nn.Linear(1, 1).double())


class Configured(Net):
    """Has its layers after ``configure_model()``."""

    def __init__(self):
        super().__init__()
        del self.layers

    def configure_model(self):
        torch.manual_seed(1)
        if not hasattr(self, "layers"):
            self.layers = torch.nn.ModuleList([torch.nn.Linear(5, 16), Tanh(16, 16)])


class Tanh(torch.nn.Linear):
    """A class of modules that only ``configure_model()`` makes."""


@pytest.mark.needs("torch>=2.6")
def test_a_class_may_come_from_configure_model(frame, two_workers):
    fits = [fit(frame, two_workers, each, Configured()) for each in (FSDP2(wrap=Tanh), "none")]
    assert_same(*fits)


class Scaled(Net):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))


class Tied(Net):
    def __init__(self):
        super().__init__()
        self.again = torch.nn.Linear(16, 1)
        self.again.weight = self.last.weight


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"model": Scaled()}, "scale belongs to the module itself: move it to a layer"),
        ({"model": Mixed()}, "parameters of last together, and they are float32, float64: use sharding=FSDP2"),
        ({"model": Tied()}, "last and again share a parameter: make them one layer"),
        ({"trainer_args": {"strategy": "ddp"}}, "trainer_args has strategy, .*leave one of the two out"),
        ({"torch_backend": "gloo"}, "sharding needs torch_backend='hvd'"),
    ],
)
def test_what_cannot_be_divided_is_refused_in_the_driver(frame, tmp_path, params, text):
    with pytest.raises(ValueError, match=text):
        fit(frame, LocalBackend(1), "fsdp2", store=str(tmp_path), **params)
    assert list(tmp_path.iterdir()) == []
