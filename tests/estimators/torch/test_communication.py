"""Fits whose workers train apart in rounds, or exchange approximate gradients."""

from __future__ import annotations

import sys
from pathlib import Path

import cloudpickle
import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hvd_cluster.errors import WorkerFailedError
from hvd_cluster.estimators import DiLoCo, LocalBackend, LocalSGD, PowerSGD, TorchEstimator
from hvd_cluster.torch import Compression

# The workers cannot import a test module.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

ROWS = 64


@pytest.fixture(scope="module")
def frame():
    x = np.random.default_rng(0).normal(size=(ROWS, 5)).astype("float32")
    return pd.DataFrame({"x": list(x), "y": (x @ np.arange(5)).astype("float32")})


def fit(frame, backend, communication, make=None, net=None, **params):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)) if net is None else net()
    given = {
        "loss": F.mse_loss,
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "batch_size": 8,
        "epochs": 3,
        "scale_lr": False,
        "random_seed": 5,
        "verbose": 0,
        **params,
    }
    make = make or (lambda net: torch.optim.Adam(net.parameters(), lr=0.01))
    return TorchEstimator(model=net, optimizer=make(net), backend=backend, communication=communication, **given).fit(
        frame
    )


def assert_same(model, expected, atol=1e-6):
    torch.testing.assert_close(model.getModel().state_dict(), expected.getModel().state_dict(), atol=atol, rtol=0)
    pairs = zip(model.getHistory(), expected.getHistory(), strict=True)
    assert all(one["train"]["loss"] == pytest.approx(other["train"]["loss"], rel=1e-5) for one, other in pairs)


def sgd(lr, **more):
    return lambda net: torch.optim.SGD(net.parameters(), lr=lr, **more)


#: One step an epoch, of all rows: the end of the epoch ends the round.
ONE_STEP = {"batch_size": ROWS // 2, "epochs": 6}


@pytest.mark.needs("torch>=2.6")
def test_the_mean_of_weights_after_one_step_is_a_step_with_the_mean_of_gradients(frame, two_workers):
    model = fit(frame, two_workers, LocalSGD(every=2), sgd(0.05), **ONE_STEP)
    assert_same(model, fit(frame, two_workers, "every_step", sgd(0.05), **ONE_STEP))


@pytest.mark.needs("torch>=2.6")
def test_the_outer_optimizer_is_sgd_with_nesterovs_momentum(frame, two_workers):
    """After rounds of one step of SGD, it gets the mean gradient times the inner learning rate."""
    model = fit(frame, two_workers, DiLoCo(every=2, outer_lr=0.7, outer_momentum=0.6), sgd(0.05), **ONE_STEP)
    equal = sgd(0.05 * 0.7, momentum=0.6, nesterov=True)
    assert_same(model, fit(frame, two_workers, "every_step", equal, **ONE_STEP), atol=1e-5)


@pytest.mark.needs("torch>=2.6")
def test_an_outer_rate_of_one_without_momentum_is_local_sgd(frame, two_workers):
    outer = DiLoCo(every=3, outer_lr=1.0, outer_momentum=0.0)
    assert_same(fit(frame, two_workers, outer), fit(frame, two_workers, LocalSGD(every=3)))


class Watch:
    """Records after which steps the weights of the ranks are equal."""

    def scheduler(self, optimizer):
        self.optimizer, self.equal = optimizer, []
        return torch.optim.lr_scheduler.LambdaLR(optimizer, self.rate)

    def rate(self, step):
        import hvd_cluster.torch as hvd

        weights = self.optimizer.param_groups[0]["params"][0].detach().clone()
        self.equal.append(len({tuple(each.flatten().tolist()) for each in hvd.allgather_object(weights)}) == 1)
        return 1.0

    def __call__(self, record, model):
        record["equal"] = list(self.equal)


@pytest.mark.needs("torch>=2.6")
def test_weights_are_equal_after_each_round_and_each_epoch_only(frame, two_workers):
    watch = Watch()
    params = {"lr_scheduler": watch.scheduler, "lr_scheduler_interval": "step", "callbacks": [watch]}
    model = fit(frame, two_workers, LocalSGD(every=3), epochs=2, **params)
    first = [True, False, False, True, False]  # before the first of four steps, and after each
    assert model.getHistory()[1]["equal"] == [*first, False, False, True, False]
    assert model.getHistory()[1]["train"]["loss"] < model.getHistory()[0]["train"]["loss"]


@pytest.mark.needs("torch>=2.6")
def test_gradients_are_complete_before_the_first_approximate_step(frame, two_workers):
    assert_same(fit(frame, two_workers, PowerSGD(start_step=1000)), fit(frame, two_workers, "every_step"))


@pytest.mark.needs("torch>=2.6")
def test_an_approximation_of_full_rank_is_exact(frame, two_workers):
    full = PowerSGD(rank=8, start_step=2, min_compression_rate=0.01)
    assert_same(fit(frame, two_workers, full, sgd(0.05)), fit(frame, two_workers, "every_step", sgd(0.05)), atol=1e-5)


@pytest.mark.needs("torch>=2.6")
def test_what_an_approximation_leaves_out_is_sent_later(frame, two_workers):
    """One of rank 1 alone would leave the other directions of the first layer as they are."""
    params = {"epochs": 12, "gradient_clip_norm": 5.0, "backward_passes_per_step": 2}
    approximate = fit(frame, two_workers, PowerSGD(rank=1, start_step=2, min_compression_rate=1), sgd(0.05), **params)
    exact = fit(frame, two_workers, "every_step", sgd(0.05), **params)
    first, last = (exact.getHistory()[index]["train"]["loss"] for index in (0, -1))
    assert approximate.getHistory()[-1]["train"]["loss"] == pytest.approx(last, abs=0.1 * (first - last))
    assert not torch.equal(*(model.getModel().state_dict()["0.weight"] for model in (approximate, exact)))


class Spectral(nn.Module):
    """Has a complex parameter and a scalar one."""

    def __init__(self):
        super().__init__()
        self.spectrum = nn.Parameter(torch.randn(3, dtype=torch.cfloat))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.last = nn.Linear(5, 1)

    def forward(self, x):
        return self.last(torch.fft.irfft(torch.fft.rfft(x) * self.spectrum, n=5)) * self.scale


@pytest.mark.needs("torch>=2.6")
def test_complex_and_scalar_gradients_are_approximated_too(frame, two_workers):
    full = PowerSGD(rank=8, start_step=2, min_compression_rate=0.01)
    expected = fit(frame, two_workers, "every_step", sgd(0.01), net=Spectral)
    assert_same(fit(frame, two_workers, full, sgd(0.01), net=Spectral), expected, atol=1e-5)


LOW_RANK = PowerSGD(rank=1, start_step=2, min_compression_rate=1)


@pytest.mark.needs("torch>=2.6")
@pytest.mark.parametrize("communication", [LocalSGD(every=3), DiLoCo(every=3), LOW_RANK])
def test_parameters_that_a_callback_unfreezes_are_exchanged(frame, two_workers, communication):
    def half_frozen():
        net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
        net[0].requires_grad_(False)
        return net

    def unfreeze(record, model):
        import hvd_cluster.torch as hvd

        model[0].requires_grad_(True)
        first, second = hvd.allgather(model[0].weight.detach()[None])
        record["equal"] = bool(torch.equal(first, second))
        record["weight"] = float(first[0, 0])

    history = fit(frame, two_workers, communication, net=half_frozen, callbacks=[unfreeze]).getHistory()
    assert [record["equal"] for record in history] == [True] * 3
    assert history[1]["weight"] != history[0]["weight"]


@pytest.mark.needs("torch>=2.6")
@pytest.mark.parametrize("communication", [LocalSGD(every=3), DiLoCo(every=3), LOW_RANK])
def test_parameters_that_a_callback_freezes_do_not_move(frame, two_workers, communication):
    def freeze(record, model):
        if record["epoch"] == 0:
            model[0].requires_grad_(False)
        record["weights"] = [model[index].weight.flatten().tolist() for index in (0, 2)]

    history = fit(frame, two_workers, communication, callbacks=[freeze]).getHistory()
    frozen, trained = zip(*(record["weights"] for record in history), strict=True)
    assert frozen[0] == frozen[1] == frozen[2]
    assert trained[0] != trained[1]


@pytest.mark.needs("torch>=2.6")
@pytest.mark.parametrize("communication", [LocalSGD(every=3), DiLoCo(every=3), LOW_RANK])
def test_a_run_that_was_interrupted_ends_with_the_same_weights(frame, two_workers, tmp_path, communication):
    """Adam's state differs between the ranks."""

    def stop(record, model):
        import hvd_cluster.torch as hvd

        marker = Path(tmp_path) / f"rank-{hvd.rank()}"
        if record["epoch"] == 1 and not marker.exists():
            marker.touch()
            raise ValueError("stopped by the test")

    params = {"store": str(tmp_path / "work"), "run_id": "r", "callbacks": [stop], "checkpoint_every_steps": 2}
    with pytest.raises(WorkerFailedError, match="stopped by the test"):
        fit(frame, two_workers, communication, **params)
    continued = fit(frame, two_workers, communication, **params)
    undisturbed = fit(frame, two_workers, communication, store=str(tmp_path / "other"), checkpoint_every_steps=2)
    assert_same(continued, undisturbed, atol=0)


@pytest.mark.needs("torch>=2.6")
@pytest.mark.parametrize("communication", [DiLoCo(every=3), LOW_RANK])
def test_another_number_of_workers_continues(frame, two_workers, three_workers, tmp_path, communication):
    params = {"store": str(tmp_path), "run_id": "r"}
    fit(frame, two_workers, communication, epochs=1, **params)
    model = fit(frame, three_workers, communication, epochs=4, **params)
    losses = [record["train"]["loss"] for record in model.getHistory()]
    assert len(losses) == 4
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"sharding": "fsdp2"}, r"DiLoCo\(...\) and sharding exclude each other.* leave one of the two out"),
        ({"gradient_compression": Compression.fp16}, "gradient_compression has no effect"),
        ({"mixed_precision": "fp16"}, "mixed_precision='fp16' skips steps .* use 'bf16'"),
        ({"torch_backend": "gloo"}, "needs torch_backend='hvd'"),
    ],
)
def test_wrong_combinations_are_refused_before_rows_are_written(frame, tmp_path, params, text):
    with pytest.raises(ValueError, match=text):
        fit(frame, LocalBackend(1), DiLoCo(), store=str(tmp_path), **params)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("params", [{"communication": DiLoCo()}, {"communication": "every_step", "sharding": "zero1"}])
def test_a_group_of_the_launcher_with_another_backend_is_refused(frame, params):
    backend = LocalBackend(2, env={"OMP_NUM_THREADS": "1", "HOROVOD_TORCH_BACKEND": "gloo"})
    with pytest.raises(WorkerFailedError, match="backend cpu:gloo,cuda:gloo, and this needs 'hvd': leave out HOROVOD_"):
        fit(frame, backend, **params)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: LocalSGD(every=1), "every=1: it must be at least 2"),
        (lambda: DiLoCo(outer_lr=0.0), "outer_lr=0.0: it must be above 0"),
        (lambda: DiLoCo(outer_momentum=1.0), "it must be at least 0 and below 1"),
        (lambda: PowerSGD(rank=0), "rank=0: it must be at least 1"),
        (lambda: PowerSGD(start_step=1), "start_step=1: it must be at least 2"),
        (lambda: PowerSGD(min_compression_rate=0), "min_compression_rate=0: it must be above 0"),
        (
            lambda: TorchEstimator(communication="sometimes"),
            r"must be 'every_step', PowerSGD\(...\), LocalSGD\(...\) or",
        ),
    ],
)
def test_wrong_values_are_refused(make, text):
    with pytest.raises(ValueError, match=text):
        make()
