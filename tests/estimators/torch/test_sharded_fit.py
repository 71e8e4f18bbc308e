"""Fits whose workers hold parts of the model and its optimizer, against the same fits without sharding."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import cloudpickle
import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hvd_cluster.data.store import Store
from hvd_cluster.errors import DataError, WorkerFailedError
from hvd_cluster.estimators import FSDP2, EarlyStopping, LocalBackend, LocalSGD, ModelFactory, TorchEstimator
from hvd_cluster.estimators.run.checkpoint import Checkpoint
from hvd_cluster.estimators.run.run_files import RunFiles
from hvd_cluster.estimators.torch.strategies.shards import Shards

# The workers cannot import a test module.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.needs("torch>=2.6")

DIVIDED = FSDP2(min_num_params=20)


class Net(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, width)
        self.norm = nn.BatchNorm1d(width)
        self.inner = nn.Linear(width, width)
        self.last = nn.Linear(width, 1)

    def forward(self, x):
        return self.last(torch.tanh(self.inner(self.norm(torch.tanh(self.first(x))))))


@pytest.fixture(scope="module")
def frame():
    x = np.random.default_rng(0).normal(size=(128, 5)).astype("float32")
    return pd.DataFrame({"x": list(x), "y": (x @ np.arange(5)).astype("float32"), "v": [0] * 96 + [1] * 32})


def adamw(net):
    return torch.optim.AdamW(net.parameters(), lr=0.01)


def fit(frame, backend, sharding, net=None, make=adamw, **params):
    """``make`` makes the optimizer of a model."""
    net = net or Net()
    given = {
        "loss": F.mse_loss,
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "batch_size": 8,
        "epochs": 2,
        "scale_lr": False,
        "random_seed": 5,
        "verbose": 0,
        **params,
    }
    optimizer = make(net) if isinstance(net, nn.Module) else make
    return TorchEstimator(model=net, optimizer=optimizer, backend=backend, sharding=sharding, **given).fit(frame)


def losses(model):
    return [record[part]["loss"] for record in model.getHistory() for part in ("train", "validation") if part in record]


def assert_same(model, expected, atol=1e-6):
    torch.testing.assert_close(losses(model), losses(expected), atol=atol, rtol=atol)
    torch.testing.assert_close(model.getModel().state_dict(), expected.getModel().state_dict(), atol=atol, rtol=0)
    state, wanted = (one.getOptimizer().state_dict() for one in (model, expected))
    torch.testing.assert_close(state["state"], wanted["state"], atol=atol, rtol=0)
    assert type(model) is type(expected)


class Watch:
    """Records the bytes that each rank holds for parameters and for the state of the optimizer."""

    def scheduler(self, optimizer):
        self.optimizer = getattr(optimizer, "optim", optimizer)
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)

    def __call__(self, record, model):
        import hvd_cluster.torch as hvd

        def held(tensors):
            local = [one.to_local() if hasattr(one, "to_local") else one for one in tensors]
            return sum(one.untyped_storage().nbytes() for one in local)

        state = [value for entry in self.optimizer.state.values() for value in entry.values()]
        record["bytes"] = hvd.allgather_object((held(model.parameters()), held(state)))


@pytest.mark.parametrize("sharding", [DIVIDED, "zero1"])
def test_weights_losses_and_optimizer_are_those_of_a_fit_without_sharding(frame, two_workers, sharding):
    params = {
        "gradient_clip_norm": 0.5,
        "gradient_clip_value": 0.2,
        "backward_passes_per_step": 2,
        "validation": "v",
        "epochs": 3,
        "lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        "return_best": True,
        "early_stopping": EarlyStopping(monitor="train_loss"),
    }
    expected = fit(frame, two_workers, "none", **params)
    assert_same(fit(frame, two_workers, sharding, **params), expected)


@pytest.mark.slow
def test_a_worker_holds_its_part_only(frame):
    """Plain data parallelism holds 12 bytes a parameter here: the parameter and two numbers of AdamW's state."""
    held = {}
    for sharding in ("none", "zero1", FSDP2(min_num_params=2000)):
        watch = Watch()
        model = fit(
            frame, LocalBackend(4), sharding, Net(64), callbacks=[watch], lr_scheduler=watch.scheduler, epochs=1
        )
        held[str(sharding).partition("(")[0]] = model.getHistory()[0]["bytes"]
    whole = sum(held["none"][0])
    assert max(sum(each) for each in held["FSDP2"]) <= 0.35 * whole
    parameters, state = held["none"][0]
    assert {each[0] for each in held["zero1"]} == {parameters}
    assert sum(each[1] for each in held["zero1"]) == state
    assert max(each[1] for each in held["zero1"]) < 0.9 * state  # whole parameters: the largest has 3/4 of it


@pytest.mark.slow
@pytest.mark.parametrize("sharding", [DIVIDED, "zero1"])
def test_a_run_on_four_workers_continues_on_two(frame, two_workers, tmp_path, sharding):
    def run(backend, sharding, store, **params):
        return fit(frame, backend, sharding, store=str(tmp_path / store), run_id="r", **params)

    four = {"epochs": 1, "batch_size": 4}
    run(LocalBackend(4), "none", "plain", **four)
    run(LocalBackend(4), sharding, "divided", **four)
    expected = run(two_workers, "none", "plain")
    assert_same(run(two_workers, sharding, "divided"), expected)
    folders = list((tmp_path / "divided" / "runs" / "r" / "shards").iterdir())
    assert len(folders) == 1
    assert {path.name for path in folders[0].iterdir()} == {".metadata", "__0_0.distcp", "__1_0.distcp"}
    # Without sharding too.
    again = run(two_workers, "none", "divided", epochs=3)
    assert_same(again, run(two_workers, "none", "plain", epochs=3))


def test_a_run_continues_in_the_middle_of_an_epoch(frame, two_workers, tmp_path):
    def stopping(folder):
        """A scheduler that ends each worker once, after six steps."""

        def rate(step):
            import hvd_cluster.torch as hvd

            marker = Path(folder) / f"rank-{hvd.rank()}"
            if step == 6 and not marker.exists():
                marker.touch()
                raise ValueError("stopped by the test")
            return 1.0

        return lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, rate)

    params = {
        "checkpoint_every_steps": 2,
        "lr_scheduler_interval": "step",
        "lr_scheduler": stopping(str(tmp_path)),
        "run_id": "r",
        "store": str(tmp_path / "work"),
    }
    with pytest.raises(WorkerFailedError, match="stopped by the test"):
        fit(frame, two_workers, DIVIDED, **params)
    assert Checkpoint.load(RunFiles(Store.create(tmp_path / "work"), "r")).partial_epoch is not None
    assert_same(fit(frame, two_workers, DIVIDED, **params), fit(frame, two_workers, "none"))


def test_a_run_without_sharding_does_not_continue_with_it(frame, two_workers, tmp_path):
    params = {"store": str(tmp_path), "run_id": "r", "epochs": 1}
    fit(frame, two_workers, "none", **params)
    with pytest.raises(DataError, match="has a checkpoint of a fit without sharding"):
        fit(frame, two_workers, "zero1", **params)


def test_foreign_metadata_is_not_executed(frame, two_workers, tmp_path):
    params = {"store": str(tmp_path), "run_id": "r", "epochs": 1}
    fit(frame, two_workers, "zero1", **params)
    (metadata,) = tmp_path.rglob(".metadata")
    metadata.write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")
    with pytest.raises(DataError, match=r"is not a checkpoint of this run \(it holds os.system\)"):
        fit(frame, two_workers, "zero1", **{**params, "epochs": 2})


class Counting(nn.Linear):
    """Counts its calls that keep activations, or compute them again."""

    calls = 0

    def forward(self, x):
        self.calls += torch.is_grad_enabled()
        return super().forward(x)


class CountingNet(Net):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.inner = Counting(16, 16)


def count(record, model):
    record["calls"] = model.inner.calls


def test_activations_are_computed_again(frame, two_workers):
    again = FSDP2(wrap=Counting, activation_checkpointing=True)
    calls = {}
    models = {}
    for sharding in ("none", FSDP2(wrap="Counting"), again):
        models[sharding] = fit(frame, two_workers, sharding, CountingNet(), callbacks=[count])
        calls[sharding] = models[sharding].getHistory()[-1]["calls"]
    assert list(calls.values()) == [16, 16, 16 + 16]
    assert_same(models[again], models["none"])


class Half(Net):
    """Asserts the dtype in which the workers compute."""

    def __init__(self, dtype):
        super().__init__()
        self.norm = nn.Identity()
        self.dtype = dtype

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        if torch.distributed.is_initialized() and hidden.dtype != self.dtype:
            raise AssertionError(f"computes in {hidden.dtype}")
        return self.last(torch.tanh(self.inner(hidden)))


def test_modules_compute_in_bfloat16_and_weights_stay_in_float32(frame, two_workers):
    model = fit(frame, two_workers, DIVIDED, Half(torch.bfloat16), mixed_precision="bf16", epochs=4)
    expected = fit(frame, two_workers, "none", Half(torch.float32), epochs=4)
    assert {one.dtype for one in model.getModel().parameters()} == {torch.float32}
    assert losses(model) != losses(expected)
    assert losses(model) == pytest.approx(losses(expected), rel=0.05)


def test_float16_scales_the_loss(frame, two_workers):
    """The scaler skips the first steps, whose gradients overflow."""
    model = fit(frame, two_workers, DIVIDED, Half(torch.float16), mixed_precision="fp16", epochs=4)
    assert losses(model)[-1] < losses(model)[0] / 2


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_batch_normalization_computes_in_float32(frame, two_workers, precision):
    params = {"epochs": 4, "validation": "v", "mixed_precision": precision}
    model = fit(frame, two_workers, DIVIDED, **params)
    assert {one.dtype for one in model.getModel().state_dict().values()} == {torch.float32, torch.int64}
    assert losses(model) == pytest.approx(losses(fit(frame, two_workers, "none", **params)), rel=0.1)


class TwoDtypes(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 16)
        self.last = nn.Linear(16, 1).double()

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)).double()).float()


def test_modules_of_two_dtypes_are_trained_apart(frame, two_workers):
    apart = fit(frame, two_workers, FSDP2(wrap=nn.Linear), TwoDtypes())
    assert_same(apart, fit(frame, two_workers, "none", TwoDtypes()))


class OnFirstRank(nn.Linear):
    """Refuses to get values on another rank than the first."""

    def reset_parameters(self):
        import hvd_cluster.torch as hvd

        if not self.weight.is_meta and hvd.is_initialized() and hvd.rank():
            raise AssertionError(f"rank {hvd.rank()} holds the whole layer")
        super().reset_parameters()


class Large(nn.Module):
    def __init__(self, layer):
        super().__init__()
        with torch.device("meta"):
            self.layer = layer(5, 16)
            self.last = nn.Linear(16, 1)
        self.register_buffer("offsets", torch.arange(16.0) / 16, persistent=False)

    def forward(self, x):
        return self.last(torch.tanh(self.layer(x) + self.offsets))


def test_only_the_first_rank_holds_a_model_of_the_meta_device(frame, two_workers):
    model = fit(frame, two_workers, DIVIDED, ModelFactory(Large, OnFirstRank))
    assert_same(model, fit(frame, two_workers, "none", ModelFactory(Large, nn.Linear)))
    assert model.getModelFactory() is not None


def with_frozen_layer():
    net = Net()
    net.first.requires_grad_(False)
    return net


@pytest.mark.parametrize("sharding", [DIVIDED, "zero1"])
def test_a_factory_of_a_frozen_base_works_with_sharding(frame, two_workers, tmp_path, sharding):
    def run(sharding, store, **params):
        return fit(frame, two_workers, sharding, with_frozen_layer, store=str(tmp_path / store), run_id="r", **params)

    for epochs in (1, 2):
        model, expected = run(sharding, "divided", epochs=epochs), run("none", "plain", epochs=epochs)
        torch.testing.assert_close(model.getModel().state_dict(), expected.getModel().state_dict(), atol=1e-6, rtol=0)
    assert torch.equal(model.getModel().first.weight, Net().first.weight)
    saved = torch.load(tmp_path / "divided" / "runs" / "r" / "checkpoint")
    stored = Shards(Store.create(tmp_path / "divided"), "r", saved["shards"]).shapes()
    assert ("model.first.weight" in stored) == (sharding is DIVIDED)


@pytest.mark.parametrize("before", ["zero1", "none"])
def test_a_factory_of_a_frozen_base_continues_with_fully_sharded_workers(frame, two_workers, tmp_path, before):
    """A checkpoint of ``zero1`` lacks what the factory makes."""

    def run(sharding, store, epochs, make=with_frozen_layer, **params):
        given = {"store": str(tmp_path / store), "run_id": "r", "epochs": epochs, **params}
        return fit(frame, two_workers, sharding, make, **given)

    communication = LocalSGD(every=2) if before == "none" else "every_step"
    run(before, "divided", 1, communication=communication)
    with pytest.raises(DataError, match="another model than the factory makes now"):
        run(DIVIDED, "divided", 2, Net)
    assert run(DIVIDED, "divided", 1).getHistory()  # over
    model = run(DIVIDED, "divided", 2)
    assert torch.equal(model.getModel().first.weight, Net().first.weight)
    if before == "zero1":
        run("none", "plain", 1)
        expected = run("none", "plain", 2)
        torch.testing.assert_close(model.getModel().state_dict(), expected.getModel().state_dict(), atol=1e-6, rtol=0)


class Signed(torch.optim.Optimizer):
    """Keeps options outside of ``defaults``, as optimizers outside of torch do; one is a required argument."""

    def __init__(self, params, rho, *, lr=0.1, sign=1.0):
        super().__init__(params, {"lr": lr})
        self.rho, self.sign, self.power = rho, sign, 1.0

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= self.sign * group["lr"] * self.rho**self.power * parameter.grad


def signed(net):
    optimizer = Signed(net.parameters(), 0.5, sign=-1.0)
    optimizer.power = 3.0
    return optimizer


@pytest.mark.parametrize("sharding", [DIVIDED, "zero1"])
def test_options_of_an_optimizer_outside_of_its_defaults_are_kept(frame, two_workers, sharding):
    models = [fit(frame, two_workers, each, make=signed) for each in (sharding, "none")]
    assert_same(*models)
    assert models[0].getOptimizer().power == 3.0


class OfRows(torch.optim.Optimizer):
    """Keeps a sum or a mean of each row of a parameter, or the sum whole on each rank.

    torch 2.14 computes a mean whole where there are fewer rows than ranks.
    """

    def __init__(self, params, kept, lr=0.01):
        super().__init__(params, {"lr": lr, "kept": kept})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                row = parameter.grad.pow(2)
                if parameter.dim() > 1:
                    row = (row.mean if group["kept"] == "mean" else row.sum)(dim=-1, keepdim=True)
                if group["kept"] == "whole" and hasattr(row, "full_tensor"):
                    row = row.redistribute(placements=[torch.distributed.tensor.Replicate()])
                kept = self.state[parameter].setdefault("row", torch.zeros_like(row))
                assert getattr(kept, "placements", ()) == getattr(row, "placements", ())
                kept.mul_(0.9).add_(row, alpha=0.1)
                if group["kept"] == "sum":
                    parameter.addcdiv_(parameter.grad, kept.sqrt() + 0.1, value=-group["lr"])
                    continue
                change = parameter.grad / (kept.sqrt() + 0.1)
                if hasattr(change, "redistribute"):
                    change = change.redistribute(placements=parameter.placements)
                parameter.sub_(change, alpha=group["lr"])


def of_rows(net, kept):
    return OfRows(net.parameters(), kept)


@pytest.mark.parametrize("kept", ["sum", "mean", "whole"])
def test_statistics_of_rows_are_continued(frame, two_workers, tmp_path, kept):
    make = partial(of_rows, kept=kept)
    params = {"store": str(tmp_path), "run_id": "r", "make": make}
    for epochs in (1, 2):
        model = fit(frame, two_workers, DIVIDED, epochs=epochs, **params)
    assert_same(model, fit(frame, two_workers, "none", make=make, epochs=2))


class Kinds:
    """Records the types of the parameters that callbacks see."""

    def __call__(self, record, model):
        record.setdefault("kinds", []).append(sorted({type(one).__name__ for one in model.parameters()}))
        with torch.no_grad():
            model(torch.zeros(2, 5))


def test_callbacks_see_parts_of_parameters_after_a_validation(frame, two_workers):
    """No checkpoint divides them again: none is due after the second epoch, and its loss is worse."""
    params = {"validation": "v", "epochs": 3, "make": signed, "callbacks": [Kinds(), Kinds()]}
    model = fit(frame, two_workers, FSDP2(), checkpoint_every_epochs=10, **params)
    assert [record["kinds"] for record in model.getHistory()] == [[["DTensor"], ["DTensor"]]] * 3


class Versioned(nn.Module):
    """As of version 2 the state holds the logarithm of the scale; older states are migrated, as torch suggests."""

    _version = 2

    def __init__(self, device=None):
        super().__init__()
        self.inner, self.last = nn.Linear(5, 16, device=device), nn.Linear(16, 1, device=device)
        self.log_scale = nn.Parameter(torch.zeros(16, device=device))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.constant_(self.log_scale, 0.5)

    def _load_from_state_dict(self, state, prefix, metadata, *more):
        if metadata.get("version", 1) < 2:
            state[prefix + "log_scale"] = state[prefix + "log_scale"].clamp(min=1e-6).log()
        super()._load_from_state_dict(state, prefix, metadata, *more)

    def forward(self, x):
        return self.last(self.inner(x) * self.log_scale.exp())


@pytest.mark.parametrize("sharding", [DIVIDED, "zero1"])
@pytest.mark.parametrize("device", [None, "meta"])
def test_modules_learn_the_version_of_their_state(frame, two_workers, tmp_path, sharding, device):
    for epochs in (1, 2):  # the second fit continues the first one
        model = fit(
            frame,
            two_workers,
            sharding,
            ModelFactory(Versioned, device) if device else Versioned(),
            lambda net: torch.optim.SGD(net.parameters(), lr=0.0),
            store=str(tmp_path),
            run_id="r",
            epochs=epochs,
        )
        assert model.getModel().log_scale.tolist() == [0.5] * 16
