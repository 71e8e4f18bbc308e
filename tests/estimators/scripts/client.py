# ruff: noqa: I001, N802, C408 - compat comes first; the spelling is that of such programs
"""A program that builds on the estimators as SynapseML's deep-learning module does, in Horovod's names; prints JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import hvd_cluster.compat  # noqa: F401
import horovod
from horovod.runner import run as run_function
from horovod.spark.common.backend import SparkBackend
from horovod.spark.common.store import LocalStore
from horovod.spark.lightning import TorchEstimator, TorchModel
from horovod.spark.torch import TorchEstimator as PlainEstimator
import horovod.torch as hvd
import cloudpickle
import lightning.pytorch as pl
import numpy as np
import torch
import torch.nn.functional as F
from pyspark import keyword_only
from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.sql import SparkSession, functions

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class PredictionParams(Params):
    label_col = Param(Params._dummy(), "label_col", "column of the label", TypeConverters.toString)
    image_col = Param(Params._dummy(), "image_col", "column of the path of the image", TypeConverters.toString)
    prediction_col = Param(Params._dummy(), "prediction_col", "column of the prediction", TypeConverters.toString)

    def getLabelCol(self):
        return self.getOrDefault(self.label_col)

    def getImageCol(self):
        return self.getOrDefault(self.image_col)

    def getPredictionCol(self):
        return self.getOrDefault(self.prediction_col)


class Net(pl.LightningModule):
    def __init__(self, image_col, label_col, num_classes, rate):
        super().__init__()
        torch.manual_seed(0)
        self.image_col, self.label_col, self.rate = image_col, label_col, rate
        self.layer = torch.nn.Linear(4, num_classes)

    def forward(self, x):
        return self.layer(x)

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch[self.image_col]), batch[self.label_col].long())
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.rate)


class TaskBackend(SparkBackend):
    """Records the arguments of the base class."""

    def __init__(self, num_proc=None, env=None, **kwargs):
        super().__init__(num_proc=num_proc, env=env, **kwargs)

    def run(self, fn, args=(), kwargs=None, env=None):
        assert (self._num_proc, self._env, self._kwargs["verbose"]) == (2, {"OMP_NUM_THREADS": "1"}, 0)
        return super().run(fn, args=args, kwargs=kwargs or {}, env=env or {})


def load_image(row, image_col, label_col):
    return {image_col: np.load(row[image_col]).astype(np.float32), label_col: np.int64(row[label_col])}


class Classifier(TorchEstimator, PredictionParams):
    num_classes = Param(Params._dummy(), "num_classes", "number of classes", TypeConverters.toInt)

    @keyword_only
    def __init__(self, num_classes=None, store=None, epochs=None, batch_size=None, label_col=None, image_col=None):
        super().__init__()
        self._setDefault(
            num_classes=None,
            feature_cols=["image"],
            label_cols=["label"],
            label_col="label",
            image_col="image",
            prediction_col="prediction",
            input_shapes=[[-1, 4]],
        )
        self._set(**{name: value for name, value in self._input_kwargs.items() if value is not None})
        self.setFeatureCols([self.getImageCol()]).setLabelCols([self.getLabelCol()])
        self.setModel(Net(self.getImageCol(), self.getLabelCol(), self.getNumClasses(), rate=0.05))

    def getNumClasses(self):
        return self.getOrDefault(self.num_classes)

    def _fit(self, dataset):
        image, label = self.getImageCol(), self.getLabelCol()
        self.setTransformationFn(lambda row: load_image(row, image, label))
        self.setTransformationEditFields([(image, np.float32, (4,), False), (label, np.int64, (), False)])
        return super()._fit(dataset)

    def _get_or_create_backend(self):
        return self.getBackend() or TaskBackend(2, env={"OMP_NUM_THREADS": "1"}, verbose=0, stdout=None, stderr=None)

    def get_model_class(self):
        return ClassifierModel

    def _get_model_kwargs(self, model, history, optimizer, run_id, metadata):
        return dict(
            history=history,
            model=model,
            optimizer=optimizer,
            input_shapes=self.getInputShapes(),
            run_id=run_id,
            _metadata=metadata,
            loss=self.getLoss(),
            loss_constructors=self.getLossConstructors(),
            label_col=self.getLabelCol(),
            image_col=self.getImageCol(),
            prediction_col=self.getPredictionCol(),
        )


class ClassifierModel(TorchModel, PredictionParams):
    @keyword_only
    def __init__(
        self,
        history=None,
        model=None,
        input_shapes=None,
        optimizer=None,
        run_id=None,
        _metadata=None,
        loss=None,
        loss_constructors=None,
        label_col="label",
        image_col="image",
        prediction_col="prediction",
    ):
        super().__init__()
        self._setDefault(optimizer=None, label_col="label", image_col="image", prediction_col="prediction")
        self._set(**self._input_kwargs)
        self.setFeatureColumns([self.getImageCol()])
        self.setLabelColoumns([self.getLabelCol()])

    def getOptimizer(self):
        return None

    def get_prediction_fn(self):
        image = self.getImageCol()

        def predict_fn(model, row):
            with torch.no_grad():
                return model(torch.tensor(np.load(row[image]).astype(np.float32)).unsqueeze(0))

        return predict_fn

    def _transform(self, df):
        scored = super()._transform(df)
        [output] = self.getOutputCols()
        argmax = functions.udf(lambda vector: float(vector.argmax()), "double")
        return scored.withColumn(self.getPredictionCol(), argmax(output))


def fit_plain_module(spark, folder):
    """horovod.spark.torch's estimator, with the arguments and setters of Horovod's example."""
    data = spark.createDataFrame([(float(i % 7), 3.0 * (i % 7)) for i in range(128)], ["x", "y"])
    torch.manual_seed(0)
    net = torch.nn.Linear(1, 1)
    estimator = PlainEstimator(
        backend=SparkBackend(num_proc=2, stdout=sys.stderr, stderr=sys.stderr, prefix_output_with_timestamp=True),
        store=LocalStore(str(folder / "plain")),
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.005),
        loss=lambda output, label: F.mse_loss(output, label.float()),
        metrics=[lambda output, label: (output - label).abs().mean()],
        input_shapes=[[-1, 1]],
        label_shapes=[[-1, 1]],
        feature_cols=["x"],
        label_cols=["y"],
        validation=0.25,
        gradient_compression=hvd.Compression.fp16,
        batch_size=8,
        epochs=4,
        verbose=0,
    )
    model = estimator.setRandomSeed(1).fit(data).setOutputCols(["guess"])
    history = model.getHistory()
    row = model.transform(data).where("x = 2.0").first()
    return {
        "learnt": history[-1]["train"]["loss"] < history[0]["train"]["loss"] and abs(row["guess"] - 6.0) < 3.0,
        "history": [sorted(record["validation"]) for record in history[:1]],
        "columns": list(row.asDict()),
        "checkpoints": len(list((folder / "plain/runs").iterdir())),
    }


def main() -> None:
    folder = Path(sys.argv[1])
    assert horovod.__version__ == "0.28.1"
    assert run_function(lambda: 7, num_proc=1) == [7]
    random = np.random.default_rng(0)
    rows = []
    for index in range(64):
        values = random.normal(size=4)
        np.save(folder / f"{index}.npy", values)
        rows.append((str(folder / f"{index}.npy"), int(values[0] > 0)))
    spark = SparkSession.builder.master("local[2]").getOrCreate()
    data = spark.createDataFrame(rows, ["picture", "kind"])
    estimator = Classifier(
        num_classes=2,
        store=LocalStore(str(folder / "store")),
        epochs=8,
        batch_size=8,
        label_col="kind",
        image_col="picture",
    )
    model = estimator.setVerbose(0).fit(data)
    scored = model.transform(data)
    right = scored.where("prediction = kind").count()
    vector = scored.first()["kind__output"]
    found = {
        "class": type(model).__name__,
        "columns": scored.columns,
        "right": right,
        "vector": [type(vector).__name__, len(vector)],
        "optimizer": model.getOptimizer(),
        "epochs": len(model.getHistory()),
        "runs": len(list((folder / "store/runs").iterdir())),
        "plain": fit_plain_module(spark, folder),
    }
    spark.stop()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
