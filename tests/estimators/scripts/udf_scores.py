"""Fits a Spark DataFrame, logs the model to the MLflow folder in argv[1], and compares its spark_udf with transform."""

from __future__ import annotations

import datetime as dt
import json
import os
import sys
from decimal import Decimal
from pathlib import Path

import mlflow
import mlflow.pyfunc
import numpy as np
import torch
import torch.nn.functional as F
from pyspark.ml.functions import vector_to_array
from pyspark.ml.linalg import Vectors, VectorUDT
from pyspark.sql import Row, SparkSession
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from hvd_cluster.data.columns.raw_arrays import raw_array
from hvd_cluster.estimators import TorchEstimator

FOLDER = Path(sys.argv[1])
WORDS = ["good", "bad", "fine"]


def encoded(batch):
    """A feature of each kind of column, of shape (rows, 11); the kinds are asserted."""
    words = [WORDS.index(word) if word else -1 for word in batch["word"]]
    assert batch["array"].dtype == np.float32
    count = np.nan_to_num(np.asarray(batch["count"], np.float64), nan=-1.0)
    sizes = [-1 if data is None else data[0] for data in batch["data"]]
    days, moments = (batch[name] for name in ("day", "moment"))
    assert (days.dtype.kind, moments.dtype.kind, batch["price"].dtype) == ("M", "M", np.float64)
    days = np.where(np.isnat(days), -1, days.astype("datetime64[D]").astype(int) % 97)
    moments = np.where(np.isnat(moments), -1, moments.astype("datetime64[us]").astype(int) % 9973)
    prices = np.nan_to_num(batch["price"], nan=-1.0)
    # Spark gives a null struct to a pandas UDF as a struct of nulls.
    known = [
        place if place is not None and place["x"] is not None else {"x": -1.0, "name": ""} for place in batch["place"]
    ]
    places = [place["x"] + len(place["name"] or "") for place in known]
    parts = [words, batch["array"], batch["vector"], count, sizes, days, moments / 9973, prices, places]
    return np.column_stack(parts)


def rows(number=30):
    rng = np.random.default_rng(0)
    return [
        (
            WORDS[row % 3] if row % 7 else None,
            [float(number) for number in rng.normal(size=2).astype("f4")],
            Vectors.dense(rng.normal(size=2)),
            row if row % 5 else None,
            bytes([row]) if row % 4 else None,
            dt.date(2024, 1, 1) + dt.timedelta(days=row) if row % 6 else None,
            dt.datetime(2024, 1, 1, 3, 4, 5, 678900 + row) if row % 8 else None,  # noqa: DTZ001
            Decimal(row) / 4 if row % 9 else None,
            Row(x=row / 8, name="a" * row if row % 3 else None) if row % 10 else None,
            row % 2,
        )
        for row in range(number)
    ]


PLACE = StructType([StructField("x", DoubleType()), StructField("name", StringType())])
COLUMNS = {
    "word": StringType(),
    "array": ArrayType(FloatType()),
    "vector": VectorUDT(),
    "count": IntegerType(),
    "data": BinaryType(),
    "day": DateType(),
    "moment": TimestampType(),
    "price": DecimalType(10, 2),
    "place": PLACE,
    "y": IntegerType(),
}


def local_columns(frame, names):
    """The columns as Arrow data in this process; vectors as lists."""
    table = frame.withColumn("vector", vector_to_array("vector")).select(names).toArrow()
    return [table.column(name) for name in names]


def main() -> None:
    mlflow.set_tracking_uri(f"sqlite:///{FOLDER}/mlflow.db")
    experiment = mlflow.create_experiment("spark", artifact_location=str(FOLDER / "kept"))
    mlflow.set_experiment(experiment_id=experiment)
    os.environ["PYSPARK_PYTHON"] = sys.executable
    master, builder = os.environ["SESSION"], SparkSession.builder.config("spark.sql.session.timeZone", "UTC")
    if master == "connect":
        spark = builder.remote("local[1]").getOrCreate()
    else:
        spark = builder.master(master).config("spark.ui.enabled", "false").getOrCreate()
    schema = StructType([StructField(name, kind) for name, kind in COLUMNS.items()])
    names = schema.names[:-1]
    frame = spark.createDataFrame(rows(), schema).coalesce(1)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(11, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
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
    found = frame.select(udf(*names).alias("out")).select("out.*").collect()
    columns = {name: raw_array(column) for name, column in zip(names, local_columns(frame, names), strict=True)}
    with torch.no_grad():
        local = torch.softmax(model.getModel()(torch.from_numpy(encoded(columns)).float()), 1).tolist()
    different = sum(
        not (list(one["p"]) == list(other["p"]) == mine) or one["guess"] != other["guess"]
        for one, other, mine in zip(scored, found, local, strict=True)
    )
    print("FOUND " + json.dumps({"rows": len(found), "different": different}))
    spark.stop()


if __name__ == "__main__":
    main()
