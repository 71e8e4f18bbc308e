"""What travels to workers is on the CPU, and what the user has stays where it is."""

from __future__ import annotations

import sys

import cloudpickle
import numpy as np
import pytest
import torch

from hvd_cluster.estimators import Backend, TorchEstimator
from hvd_cluster.estimators.torch.model_pickling import on_cpu

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Away:
    """A module on the meta device, which is any machine's; a tensor there has no values to bring to the CPU."""

    def cpu(self):
        self.to_empty(device="cpu")
        for tensor in (*self.parameters(), *self.buffers()):
            torch.nn.init.constant_(tensor, 0.5)
        return self

    def to(self, *args, **kwargs):
        return self.cpu()


class Net(Away, torch.nn.Linear):
    pass


class Loss(Away, torch.nn.Module):
    def __init__(self, device):
        super().__init__()
        self.register_buffer("factor", torch.ones(1, device=device))

    def forward(self, output, label):
        return ((output - label) ** 2 * self.factor).mean()


class Seen(Backend):
    """Keeps what it sends to another one's workers."""

    def __init__(self, other):
        self._other = other

    def run(self, fn, args=(), kwargs=None, env=None):
        (self.spec,) = args
        return self._other.run(fn, args, kwargs, env)

    def num_processes(self):
        return self._other.num_processes()


def tensors_of(spec):
    modules = [spec.model, *spec.objective.losses, *(metric for group in spec.metrics for metric in group)]
    states = [value for state in spec.optimizer.state_dict["state"].values() for value in state.values()]
    return [*(tensor for one in modules for tensor in (*one.parameters(), *one.buffers())), *states]


def fit(frame, backend, device, steps_before=0):
    net, loss, metric = Net(4, 1, device=device), Loss(device), Loss(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(steps_before):
        net(torch.ones(3, 4, device=device)).sum().backward()
        optimizer.step()
    model = TorchEstimator(
        model=net,
        optimizer=optimizer,
        loss=loss,
        metrics=[metric],
        feature_cols=["x"],
        label_cols=["y"],
        epochs=1,
        backend=backend,
        verbose=0,
    ).fit(frame)
    mine = (*net.parameters(), *loss.buffers(), *metric.buffers())
    assert {tensor.device.type for tensor in mine} == {torch.device(device).type}
    assert np.isfinite(model.getHistory()[0]["train"]["all_metrics"][0]["group_0_y"])
    assert model.getModel().weight.device.type == "cpu"


def test_a_model_on_another_device_travels_on_the_cpu(frame, one_worker):
    seen = Seen(one_worker)
    fit(frame, seen, "meta")
    assert {tensor.device.type for tensor in tensors_of(seen.spec)} == {"cpu"}


@pytest.mark.gpu
def test_a_model_and_an_optimizer_on_a_gpu_travel_on_the_cpu(frame, one_worker, monkeypatch):
    for name in ("cpu", "to"):
        monkeypatch.delattr(Away, name)
    seen = Seen(one_worker)
    fit(frame, seen, "cuda", steps_before=2)
    assert {tensor.device.type for tensor in tensors_of(seen.spec)} == {"cpu"}


def test_a_model_on_the_cpu_travels_as_it_is(frame, one_worker):
    seen = Seen(one_worker)
    net = torch.nn.Linear(4, 1)
    TorchEstimator(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.01),
        loss=torch.nn.functional.mse_loss,
        feature_cols=["x"],
        label_cols=["y"],
        epochs=1,
        backend=seen,
        verbose=0,
    ).fit(frame)
    assert seen.spec.model is net


def test_numbers_of_numpy_become_pythons():
    assert on_cpu({"lr": np.float64(0.5), "betas": (np.float32(1), 2)}) == {"lr": 0.5, "betas": (1.0, 2)}
