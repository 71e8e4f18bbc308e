"""Fits in MLflow, against a server of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
import torch
import torch.nn.functional as F

from hvd_cluster.errors import WorkerFailedError
from hvd_cluster.estimators import TorchEstimator

mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
pytest.importorskip("alembic", reason="the server of mlflow needs alembic")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings(
        "default:::mlflow", "default:::pydantic", "default:::opentelemetry", "default::FutureWarning"
    ),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The address of an MLflow server with a database and a folder of its own."""
    folder = tmp_path_factory.mktemp("mlflow")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{folder}/runs.db", "--artifacts-destination", str(folder / "kept")]
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=folder, start_new_session=True)
    try:
        deadline_s = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                assert time.monotonic() < deadline_s, (folder / "log").read_text()[-2000:]
                time.sleep(0.3)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, 9)
        process.wait()


@pytest.fixture
def client(server):
    mlflow.set_tracking_uri(server)
    yield mlflow.MlflowClient()
    mlflow.set_tracking_uri(None)


def estimator(backend, **params):
    net = torch.nn.Linear(4, 1)
    given = {"feature_cols": ["x"], "label_cols": ["y"], "epochs": 3, "validation": 0.2, "verbose": 0, **params}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    return TorchEstimator(model=net, optimizer=optimizer, loss=F.mse_loss, backend=backend, **given)


def test_a_fit_is_one_run_with_params_metrics_and_the_model(frame, two_workers, client):
    model = estimator(two_workers, mlflow="digits", run_id="mine").fit(frame)
    experiment = client.get_experiment_by_name("digits")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("mine", "FINISHED")
    assert run.data.params["epochs"] == "3"
    assert run.data.params["loss"] == "mse_loss"
    logged = client.get_metric_history(run.info.run_id, "validation_loss")
    assert [(one.step, one.value) for one in logged] == [
        (record["epoch"], pytest.approx(record["validation"]["loss"])) for record in model.getHistory()
    ]
    (saved,) = client.search_logged_models([experiment.experiment_id])
    loaded = mlflow.pytorch.load_model(f"models:/{saved.model_id}")
    assert torch.equal(loaded.weight, model.getModel().weight)


def test_a_fit_inside_of_a_run_is_its_child(frame, two_workers, client):
    mlflow.set_experiment("outer")
    with mlflow.start_run() as outer:
        estimator(two_workers, mlflow=True, epochs=1).fit(frame)
        assert mlflow.active_run().info.run_id == outer.info.run_id
    runs = client.search_runs([outer.info.experiment_id], f"tags.mlflow.parentRunId = '{outer.info.run_id}'")
    assert [run.info.status for run in runs] == ["FINISHED"]


def test_a_fit_that_fails_is_a_failed_run(frame, two_workers, client):
    def broken(record, model):
        raise KeyError("the user's mistake")

    with pytest.raises(WorkerFailedError):
        estimator(two_workers, mlflow="failing", callbacks=[broken]).fit(frame)
    (run,) = client.search_runs([client.get_experiment_by_name("failing").experiment_id])
    assert run.info.status == "FAILED"
