"""Fits a Spark DataFrame, logs the model to the MLflow folder in argv[1], and compares its spark_udf with transform."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import mlflow
import mlflow.pyfunc
import numpy as np
import torch
import torch.nn.functional as F
from pyspark.ml.linalg import Vectors, VectorUDT
from pyspark.sql import SparkSession
from pyspark.sql.types import ArrayType, FloatType, IntegerType, StringType, StructField, StructType

from hvd_cluster.estimators import TorchEstimator

FOLDER = Path(sys.argv[1])
WORDS = ["good", "bad", "fine"]


def encoded(batch):
    words = [WORDS.index(word) if word else -1 for word in batch["word"]]
    assert batch["array"].dtype == np.float32
    count = np.nan_to_num(np.asarray(batch["count"], np.float64), nan=-1.0)
    return np.column_stack([words, batch["array"], batch["vector"], count])


def main() -> None:
    mlflow.set_tracking_uri(f"sqlite:///{FOLDER}/mlflow.db")
    experiment = mlflow.create_experiment("spark", artifact_location=str(FOLDER / "kept"))
    mlflow.set_experiment(experiment_id=experiment)
    os.environ["PYSPARK_PYTHON"] = sys.executable
    spark = SparkSession.builder.master(os.environ["MASTER"]).config("spark.ui.enabled", "false").getOrCreate()
    rng = np.random.default_rng(0)
    rows = [
        (
            WORDS[row % 3] if row % 7 else None,
            [float(number) for number in rng.normal(size=2).astype("f4")],
            Vectors.dense(rng.normal(size=2)),
            row if row % 5 else None,
            row % 2,
        )
        for row in range(30)
    ]
    names = ["word", "array", "vector", "count", "y"]
    types = [StringType(), ArrayType(FloatType()), VectorUDT(), IntegerType(), IntegerType()]
    schema = StructType([StructField(*one) for one in zip(names, types, strict=True)])
    frame = spark.createDataFrame(rows, schema).coalesce(1)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    estimator = TorchEstimator(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.01),
        loss=F.cross_entropy,
        label_cols=["y"],
        preprocess=encoded,
        output_cols=["p", "guess"],
        output_kinds=["probability", "argmax"],
        verbose=0,
        num_proc=1,
    )
    model = estimator.fit(frame)
    info = model.log_model()
    udf = mlflow.pyfunc.spark_udf(spark, info.model_uri)
    scored = model.transform(frame).select("p", "guess").collect()
    found = frame.select(udf("word", "array", "vector", "count").alias("out")).select("out.*").collect()
    different = sum(
        list(one["p"]) != list(other["p"]) or one["guess"] != other["guess"]
        for one, other in zip(scored, found, strict=True)
    )
    print("FOUND " + json.dumps({"rows": len(found), "different": different}))
    spark.stop()


if __name__ == "__main__":
    main()
