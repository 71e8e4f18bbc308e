"""Fits and logs models to the MLflow database and folder in argv[1], and writes there what transform returns."""

from __future__ import annotations

import datetime as dt
import decimal
import json
import sys
from pathlib import Path

import mlflow
import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F

import hvd_cluster.torch as hvd
from hvd_cluster.estimators import TorchEstimator, TorchModel

FOLDER = Path(sys.argv[1])
CITIES = ["Rome", "Oslo", "Bonn"]
ROWS = 40
rng = np.random.default_rng(0)
FRAME = pd.DataFrame(
    {
        "text": [None if row % 7 == 0 else CITIES[row % 3] for row in range(ROWS)],
        "raw": [bytes(rng.integers(0, 256, 4, dtype=np.uint8)) for _ in range(ROWS)],
        "array": list(rng.normal(size=(ROWS, 3)).astype(np.float32)),
        "matrix": list(rng.normal(size=(ROWS, 2, 2))),
        "count": pd.array([None if row % 5 == 0 else row for row in range(ROWS)], dtype="Int64"),
        "number": np.arange(ROWS, dtype=np.int32),
        "day": [dt.date(2024, 1 + row % 12, 3) for row in range(ROWS)],
        "moment": pd.date_range("2024-01-01", periods=ROWS, tz="UTC"),
        "kind": pd.Categorical([["a", "b"][row % 2] for row in range(ROWS)]),
        "price": [decimal.Decimal(row) / 8 for row in range(ROWS)],
        "tags": [{"colour": ["red", "blue"][row % 2]} for row in range(ROWS)],
        "y": np.arange(ROWS) % 3,
    }
)


def encoded(batch):
    """float32 and float64 differ here, so a column in another type than in the training changes the result."""
    assert batch["array"].dtype == np.float32
    assert batch["number"].dtype == np.int32
    assert batch["day"].dtype == np.dtype("datetime64[D]")
    columns = [
        [CITIES.index(text) if text else -1 for text in batch["text"]],
        [sum(raw) / 100 for raw in batch["raw"]],
        *np.sin(batch["array"]).T,
        *batch["matrix"].reshape(-1, 4).T,
        np.nan_to_num(batch["count"], nan=-1.0),
        batch["number"],
        batch["day"].astype("datetime64[M]").astype(np.int64) % 12,
        batch["moment"].astype("datetime64[D]").astype(np.int64) % 31,
        batch["kind"] == "a",
        np.asarray(batch["price"], np.float64),
        [tags["colour"] == "red" for tags in batch["tags"]],
    ]
    if any(text == "nowhere" for text in batch["text"]):
        raise ValueError("nowhere")
    return np.stack([np.asarray(column, np.float64) for column in columns], axis=1)


class Net(torch.nn.Module):
    """Parametrized, so that its class is made at run time."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(16, 8))
        self.norm = hvd.SyncBatchNorm(8)  # not where the model is loaded: it is of this package
        self.last = torch.nn.Linear(8, 3)

    def forward(self, features):
        return {"logits": self.last(torch.sigmoid(self.norm(self.first(features))))}


def fitted():
    torch.manual_seed(0)
    net = Net()
    estimator = TorchEstimator(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.01),
        loss=F.cross_entropy,
        preprocess=encoded,
        on_error="skip",
        label_cols=["y"],
        output_fn=lambda output: output["logits"],
        output_kinds=["probability", "argmax", "columns"],
        output_cols=["p", "guess", "logit"],
        epochs=1,
        verbose=0,
        num_proc=1,
        mlflow="fits",
        run_id="mine",
    )
    return estimator.fit(FRAME)


def main() -> None:
    mlflow.set_tracking_uri(f"sqlite:///{FOLDER}/mlflow.db")
    client = mlflow.MlflowClient()
    experiment = client.create_experiment("fits", artifact_location=str(FOLDER / "kept"))
    model = fitted()
    (run,) = client.search_runs([experiment])
    (logged,) = client.search_logged_models([experiment])
    mlflow.set_experiment("fits")
    again = model.log_model("again", registered_model_name="cities", alias="champion")
    added = ["p", "guess", "logit_0", "logit_1", "logit_2"]
    # A pyfunc returns a row for each row, also where preprocess fails.
    rows = pd.concat([FRAME, FRAME[:1].assign(text="nowhere")], ignore_index=True)
    rows["kind"] = rows["kind"].astype("category")
    nulls = model.copy({model.on_error: "null"})
    rows.to_pickle(FOLDER / "rows.pkl")
    nulls.transform(rows)[added].to_pickle(FOLDER / "scored.pkl")
    model.transform(FRAME[:5])[added].to_pickle(FOLDER / "scored_example.pkl")
    model.save(str(FOLDER / "saved"))
    loaded = TorchModel.load(str(FOLDER / "saved")).log_model("loaded")
    net = mlflow.pytorch.load_model(f"models:/{logged.model_id}", weights_only=False)
    found = {
        "params": run.data.params,
        "folder": logged.artifact_location,
        "signature": mlflow.models.get_model_info(again.model_uri).signature.to_dict(),
        "metadata": again.metadata,
        "version": client.get_model_version_by_alias("cities", "champion").version,
        "requirements": (Path(logged.artifact_location) / "requirements.txt").read_text().split(),
        "same_weights": torch.equal(net.last.weight, model.getModel().last.weight),
        "loaded": [loaded.signature == again.signature, loaded.saved_input_example_info is None],
    }
    print("FOUND " + json.dumps(found))


if __name__ == "__main__":
    main()
