"""TorchEstimator fits that change the structure of their module: the trained module is returned."""

from __future__ import annotations

import sys

import cloudpickle
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils import prune

from hvd_cluster.errors import WorkerFailedError
from hvd_cluster.estimators import TorchEstimator, TorchModel

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Plain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def forward(self, x):
        return self.net(x)


class LateLayer(Plain):
    def forward(self, x):
        if not hasattr(self, "last"):
            self.last = torch.nn.Linear(1, 1)
        return self.net(x) + 0 * self.last(self.net(x))


class Attention(Plain):
    def __init__(self):
        super().__init__()
        self.register_buffer("attention", None)

    def forward(self, x):
        self.attention = torch.softmax(self.net(x), 1)  # with its graph
        return self.net(x)


class Growing(Plain):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(0, 4))

    def forward(self, x):
        if self.training and len(self.seen) < 100:
            self.seen = torch.cat([self.seen, x.detach()])
        return self.net(x)


class Unpicklable(Attention):
    def forward(self, x):
        self.rows = (row for row in range(3))
        return super().forward(x)


def pruned(record, model):
    if not prune.is_pruned(model):
        prune.l1_unstructured(model.net, "weight", 0.5)


def fit(frame, backend, model, **params):
    given = {
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5),
        "loss": F.mse_loss,
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "batch_size": 8,
        "epochs": 2,
        "verbose": 0,
        "max_restarts": 0,
    }
    return TorchEstimator(model=model, backend=backend, **{**given, **params}).fit(frame)


def mean_error(model, frame):
    return float(((np.asarray(model.transform(frame)["y__output"]) - frame.y) ** 2).mean())


@pytest.mark.parametrize("module", [LateLayer, Attention, Growing])
@pytest.mark.parametrize("return_best", [False, True])
def test_a_module_whose_structure_changes_is_returned_trained(frame, two_workers, module, return_best, tmp_path):
    params = {"validation": 0.2, "return_best": True} if return_best else {}
    model = fit(frame, two_workers, module(), **params)
    assert mean_error(model, frame) < 3
    model.save(tmp_path / "model")
    assert TorchModel.load(tmp_path / "model").transform(frame).equals(model.transform(frame))


def test_the_optimizer_of_a_pruned_module_holds_its_parameters(frame, two_workers):
    model = fit(frame, two_workers, Plain(), callbacks=[pruned], epochs=3)
    net, optimizer = model.getModel().net, model.getOptimizer()
    assert net.weight_mask.sum() == 2
    by_shape = {tuple(one.shape): state["momentum_buffer"].shape for one, state in optimizer.state.items()}
    assert by_shape == {(1, 4): (1, 4), (1,): (1,)}
    held = [one for group in optimizer.param_groups for one in group["params"]]
    assert {id(one) for one in held} == {id(net.weight_orig), id(net.bias)}


def test_what_cannot_be_returned_is_named_after_the_first_step(frame, two_workers):
    with pytest.raises(
        WorkerFailedError, match=r"\(attention\), so the fit returns the module itself, but model\.rows"
    ):
        fit(frame, two_workers, Unpicklable(), epochs=500)
    with pytest.raises(WorkerFailedError, match=r"\(seen\), which a fit with sharding='zero1' cannot return: make"):
        fit(frame, two_workers, Growing(), epochs=500, sharding="zero1")
