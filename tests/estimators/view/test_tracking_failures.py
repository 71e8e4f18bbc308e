"""An MLflow server that fails at the end of a fit, in place of which stands a module of that name."""

from __future__ import annotations

import contextlib
import sys
import types

import pytest
import torch
import torch.nn.functional as F

from hvd_cluster.estimators import TorchEstimator
from hvd_cluster.estimators.view.tracking import tracked


class DownAtTheEnd:
    def create_run(self, *args, **given):
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id="r1"))

    def get_experiment_by_name(self, name):
        return types.SimpleNamespace(experiment_id="1")

    def log_param(self, *args):
        pass

    def set_terminated(self, *args):
        raise ConnectionError("the server is down")


class Unlogged:
    def log_model(self):
        raise ConnectionError("the server is down")


def estimator(**params):
    net = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    given = {"feature_cols": ["x"], "label_cols": ["y"], "mlflow": "digits", **params}
    return TorchEstimator(model=net, optimizer=optimizer, loss=F.mse_loss, num_proc=1, verbose=0, **given)


@pytest.fixture
def server(monkeypatch):
    module = types.ModuleType("mlflow")
    module.MlflowClient = DownAtTheEnd
    module.active_run = lambda: None
    module.start_run = lambda **given: contextlib.nullcontext()
    monkeypatch.setitem(sys.modules, "mlflow", module)


def test_a_trained_model_is_returned_although_the_server_is_down(server, caplog):
    with tracked(estimator(), "run") as tracker:
        tracker.finish(Unlogged())
    logging, ending = caplog.messages
    assert "with mlflow.start_run(run_id='r1'), log_model() logs it: ConnectionError: the server is down" in logging
    assert "run r1 was not set to FINISHED: ConnectionError" in ending


def test_a_server_that_is_down_hides_no_error_of_the_fit(server):
    with pytest.raises(KeyError, match="the user's mistake"), tracked(estimator(), "run"):
        raise KeyError("the user's mistake")


@pytest.mark.parametrize("params", [{}, {"output_cols": ["x"]}])
def test_a_model_that_could_not_be_logged_is_refused_before_its_training(params, frame):
    fit = estimator(**{"feature_cols": ["y__output", "x"], **params})
    (name,) = params.get("output_cols", ["y__output"])
    with pytest.raises(ValueError, match=f"adds '{name}', which is a feature column"):
        fit.fit(frame[["x", "y"]].assign(y__output=0.0))
