"""Three fits in MLflow: a plain one, one inside of a run, one that fails. Prints what the server at argv[1] has."""

from __future__ import annotations

import json
import sys

import mlflow
import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F

from hvd_cluster.errors import WorkerFailedError
from hvd_cluster.estimators import TorchEstimator

FRAME = pd.DataFrame({"x": list(np.random.default_rng(0).normal(size=(60, 4)).astype("f4")), "y": np.arange(60.0)})


def estimator(**params):
    net = torch.nn.Linear(4, 1)
    given = {"feature_cols": ["x"], "label_cols": ["y"], "epochs": 3, "validation": 0.2, "verbose": 0, **params}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    return TorchEstimator(model=net, optimizer=optimizer, loss=F.mse_loss, num_proc=1, **given)


def broken(record, model):
    raise KeyError("the user's mistake")


def main() -> None:
    mlflow.set_tracking_uri(sys.argv[1])
    client = mlflow.MlflowClient()
    model = estimator(mlflow="digits", run_id="mine").fit(FRAME)
    experiment = client.get_experiment_by_name("digits").experiment_id
    (run,) = client.search_runs([experiment])
    (saved,) = client.search_logged_models([experiment])
    loaded = mlflow.pytorch.load_model(f"models:/{saved.model_id}")
    model.log_model("again", registered_model_name="digits", alias="champion")
    champion = mlflow.pyfunc.load_model("models:/digits@champion").predict(FRAME)
    scores = mlflow.pyfunc.load_model(f"models:/{saved.model_id}").predict(FRAME)
    losses = client.get_metric_history(run.info.run_id, "validation_loss")
    plain = {
        "run": [run.info.run_name, run.info.status],
        "params": run.data.params,
        "logged": [[one.step, one.value] for one in losses],
        "history": [[record["epoch"], record["validation"]["loss"]] for record in model.getHistory()],
        "metrics": sorted(run.data.metrics),
        "time_share": [
            [one.step, one.value] for one in client.get_metric_history(run.info.run_id, "time_share/rank0/compute")
        ],
        "recorded": [[record["epoch"], record["time_share"][0]["compute"]] for record in model.getHistory()],
        "hosts": list(model.getHistory()[0]["node_usage"]),
        "same_scores": scores.equals(model.transform(FRAME)[["y__output"]]) and champion.equals(scores),
        "same_weights": torch.equal(loaded.weight, model.getModel().weight),
    }
    mlflow.set_experiment("outer")
    with mlflow.start_run() as outer:
        estimator(mlflow=True, epochs=1).fit(FRAME)
        still_active = mlflow.active_run().info.run_id == outer.info.run_id
    inner = client.search_runs([outer.info.experiment_id], f"tags.mlflow.parentRunId = '{outer.info.run_id}'")
    try:
        estimator(mlflow="failing", callbacks=[broken]).fit(FRAME)
    except WorkerFailedError:
        failing = client.search_runs([client.get_experiment_by_name("failing").experiment_id])
    found = {
        "plain": plain,
        "inner": [[run.info.status for run in inner], still_active],
        "failing": [run.info.status for run in failing],
    }
    print("FOUND " + json.dumps(found))


if __name__ == "__main__":
    main()
