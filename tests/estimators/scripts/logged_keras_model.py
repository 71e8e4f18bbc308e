"""Logs a Keras model with a layer of its own to MLflow in the folder argv[1], with what transform returns."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import keras
import mlflow
import numpy as np
import pandas as pd

from hvd_cluster.data.columns.pandas_table import to_table
from hvd_cluster.estimators import KerasModel

FOLDER = Path(sys.argv[1])
FRAME = pd.DataFrame(
    {"x": list(np.random.default_rng(0).normal(size=(20, 3)).astype("f4")), "word": ["a", "b", "c", "d"] * 5}
)


@keras.saving.register_keras_serializable("tests")
class Doubled(keras.layers.Layer):
    def call(self, x):
        return 2 * x


def encoded(batch):
    return np.concatenate([batch["x"], [[ord(word)] for word in batch["word"]]], axis=1)


def main() -> None:
    mlflow.set_tracking_uri(f"sqlite:///{FOLDER}/mlflow.db")
    experiment = mlflow.create_experiment("keras", artifact_location=str(FOLDER / "kept"))
    mlflow.set_experiment(experiment_id=experiment)
    keras.utils.set_random_seed(0)
    layers = [keras.Input((4,)), Doubled(), keras.layers.Dense(2)]
    if keras.config.backend() == "tensorflow":
        import hvd_cluster.tensorflow as hvd

        layers.append(hvd.SyncBatchNormalization())
    net = keras.Sequential(layers)
    if len(layers) > 3:
        net.layers[-1].moving_mean.assign([0.5, -2.0])
    net.compile("sgd", lambda y, output: keras.ops.mean((y - output) ** 2))
    model = KerasModel(
        model=net,
        custom_objects={"Doubled": Doubled},
        preprocess=encoded,
        feature_columns=["x", "word"],
        label_columns=["y"],
    )
    model.keep_rows(to_table(FRAME, ["x", "word"]))
    info = model.log_model()
    (logged,) = mlflow.MlflowClient().search_logged_models([experiment])
    FRAME.to_pickle(FOLDER / "rows.pkl")
    model.transform(FRAME)[["y__output"]].to_pickle(FOLDER / "scored.pkl")
    model.transform(FRAME[:5])[["y__output"]].to_pickle(FOLDER / "scored_example.pkl")
    requirements = (Path(logged.artifact_location) / "requirements.txt").read_text().split()
    print("FOUND " + json.dumps({"folder": info.artifact_path, "requirements": requirements}))


if __name__ == "__main__":
    main()
