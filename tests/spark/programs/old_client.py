# ruff: noqa: N802, N815 - the names are those of Spark ML
"""A program over Horovod's paths and extension points, as SynapseML's deep-learning module uses them.

``old_client.py KIND FOLDER`` writes what it found to FOLDER/result. Nothing in it but its first import is new.
"""

import hvd_cluster.compat  # noqa: F401 - the one line that is added to such a program

# isort: split
import io
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "plugins"))

import horovod
import horovod.spark
import lightning as pl
import numpy as np
import pandas as pd
import torch
from horovod.spark.common.backend import SparkBackend
from horovod.spark.common.store import LocalStore
from horovod.spark.lightning import TorchEstimator, TorchModel
from pyspark import keyword_only
from pyspark.ml.param import Param, Params, TypeConverters
from spark_sessions import session

if horovod.__version__ != "0.28.1":
    raise RuntimeError(f"horovod should be of version 0.28.1, found: {horovod.__version__}")


class DeepBackend(SparkBackend):
    """A backend with a run of its own: it reads what the constructor kept."""

    def run(self, fn, args=(), kwargs=None, env=None):
        full = {**(self._env or {}), **(env or {})}
        full.pop("CUDA_VISIBLE_DEVICES", None)
        self.calls = getattr(self, "calls", 0) + 1
        return horovod.spark.run(fn, args=args, kwargs=kwargs or {}, num_proc=self._num_proc, env=full, **self._kwargs)


class Perceptron(pl.LightningModule):
    """What a user hands over: a batch is a dict column -> tensor."""

    def __init__(self, label: str, feature: str) -> None:
        super().__init__()
        self.label, self.feature = label, feature
        self.net = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))

    def forward(self, x):
        return self.net(x.float())

    def training_step(self, batch, index):
        loss = torch.nn.functional.cross_entropy(self(batch[self.feature]), batch[self.label].long().flatten())
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.05)


class DeepModel(TorchModel):
    """A model with a prediction function, a column of its own and no optimizer."""

    predictionCol = Param(Params._dummy(), "predictionCol", "the predicted class", TypeConverters.toString)

    @keyword_only
    def __init__(self, **kwargs):
        super().__init__()
        self._setDefault(predictionCol="prediction", optimizer=None, loss_constructors=None, input_shapes=[[-1, 2]])
        self._set(**self._input_kwargs)
        self.setFeatureColumns(["features"])
        self.setLabelColoumns(["label"])

    def getPredictionCol(self):
        return self.getOrDefault(self.predictionCol)

    def getOptimizer(self):
        return None

    def get_prediction_fn(self):
        def predict_fn(model, row):
            with torch.no_grad():
                return model(torch.tensor([list(row["features"])]))[0]

        return predict_fn

    def _transform(self, df):
        from pyspark.sql.functions import udf

        output = self.getOutputCols()[0]
        argmax = udf(lambda vector: float(np.argmax(vector.toArray())), "double")
        scored = super()._transform(df)
        return scored.withColumn(self.getPredictionCol(), argmax(scored[output]))


class DeepEstimator(TorchEstimator):
    """An estimator with a param, a backend and a model class of its own."""

    hidden = Param(Params._dummy(), "hidden", "a param of the subclass", TypeConverters.toInt)

    @keyword_only
    def __init__(self, **kwargs):
        super().__init__()
        self._setDefault(hidden=16, feature_cols=["features"], label_cols=["label"], input_shapes=[[-1, 2]])
        self._set(**self._input_kwargs)

    def getHidden(self):
        return self.getOrDefault(self.hidden)

    def _fit(self, dataset):
        self.setModel(Perceptron(self.getLabelCols()[0], self.getFeatureCols()[0]))
        return super()._fit(dataset)

    def _get_or_create_backend(self):
        self.used = DeepBackend(
            self.getNumProc(),
            stdout=io.StringIO(),
            stderr=io.StringIO(),
            prefix_output_with_timestamp=True,
            verbose=self.getVerbose(),
        )
        return self.used

    def get_model_class(self):
        return DeepModel

    def _get_model_kwargs(self, model, history, optimizer, run_id, metadata):
        return {
            "history": history,
            "model": model,
            "optimizer": optimizer,
            "input_shapes": self.getInputShapes(),
            "feature_columns": self.getFeatureCols(),
            "label_columns": self.getLabelCols(),
            "run_id": run_id,
            "_metadata": metadata,
            "loss": self.getLoss(),
            "loss_constructors": self.getLossConstructors(),
        }


def main(kind: str, folder: str) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 2)).astype("float32")
    rows = pd.DataFrame({"features": [row.tolist() for row in x], "label": (x[:, 0] > x[:, 1]).astype("float64")})
    with session(kind, Path(folder, "spark")) as spark:
        frame = spark.createDataFrame(rows)
        estimator = DeepEstimator(
            num_proc=2, epochs=5, batch_size=16, store=LocalStore(f"{folder}/store"), verbose=1, random_seed=1
        )
        model = estimator.fit(frame)
        scored = model.transform(frame).collect()
        found = {
            "classes": [type(model).__name__, type(estimator.used).__name__, type(model.getModel()).__name__],
            "calls": estimator.used.calls,
            "hidden": estimator.getHidden(),
            "optimizer": model.getOptimizer(),
            "output": model.getOutputCols(),
            "vector": type(scored[0][model.getOutputCols()[0]]).__name__,
            "accuracy": float(np.mean([row["prediction"] == row["label"] for row in scored])),
            "epochs": len(model.getHistory()),
        }
        Path(folder, "result").write_text(json.dumps(found))


if __name__ == "__main__":
    Path(sys.argv[2], "spark").mkdir()
    main(*sys.argv[1:])
