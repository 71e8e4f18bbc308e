"""Rows that `TorchModel.transform` scores on a local Spark session, against an RDD map that calls the model row by row
(as Horovod's does) and against pyspark's `predict_batch_udf` with the same batch size: the same rows and model, in
turns; all count the rows that come out.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.measure import Table, row
from benchmarks.report import Reports
from benchmarks.spark_session import session
from hvd_cluster.estimators import TorchModel

TURNS = 3
#: Enough that the second or so that any Spark job takes does not count.
ROWS = 1_200_000
FEATURES = 20


def model() -> TorchModel:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(FEATURES, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    metadata = {"feature_dtypes": ("float32",), "output_types": ("vector",), "output_shapes": ((10,),)}
    return TorchModel(model=net.eval(), feature_columns=["x"], label_columns=["c"], _metadata=metadata)


def by_batches(fitted: TorchModel, frame: Any) -> int:
    return int(fitted.transform(frame).selectExpr("count(c__output)").first()[0])


def by_rows(fitted: TorchModel, frame: Any) -> int:
    """What a program without Arrow does: the model goes to the tasks, and is called for each row."""
    shared = frame.sparkSession.sparkContext.broadcast(fitted.getModel())

    def score(rows: Any) -> Any:
        net = shared.value
        for each in rows:
            with torch.no_grad():
                yield net(torch.tensor(each["x"], dtype=torch.float32).unsqueeze(0)).flatten().tolist()

    return int(frame.rdd.mapPartitions(score).count())


def by_batch_udf(fitted: TorchModel, frame: Any) -> int:
    """What Spark offers for it: a UDF that gets NumPy arrays."""
    from pyspark.ml.functions import predict_batch_udf
    from pyspark.sql.types import ArrayType, FloatType

    shared = frame.sparkSession.sparkContext.broadcast(fitted.getModel())

    def make_predict() -> Callable[[Any], Any]:
        net = shared.value

        def predict(inputs: Any) -> Any:
            with torch.no_grad():
                return net(torch.from_numpy(inputs).float()).numpy()

        return predict

    score = predict_batch_udf(
        make_predict,
        return_type=ArrayType(FloatType()),
        batch_size=fitted.getBatchSize(),
        input_tensor_shapes=[[FEATURES]],
    )
    return int(frame.withColumn("c__output", score("x")).selectExpr("count(c__output)").first()[0])


def measure() -> Reports:
    fitted = model()
    with session(2) as spark:
        numbers = ", ".join(f"randn({index})" for index in range(FEATURES))
        frame = spark.range(0, ROWS, 1, 2).selectExpr(f"array({numbers}) AS x").cache()
        frame.count()
        contenders: dict[str, Callable[[TorchModel, Any], int]] = {
            "ours": by_batches,
            "rows": by_rows,
            "udf": by_batch_udf,
        }
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for turn in range(TURNS + 1):
            for name, contender in contenders.items():
                began_s = time.perf_counter()
                assert contender(fitted, frame) == ROWS
                if turn:  # the first turn starts Python workers and ships the model
                    times[name].append(time.perf_counter() - began_s)
    work = f"{ROWS:,} rows of {FEATURES} numbers, 2 cores"
    peers = {"rows": "RDD map", "udf": "predict_batch_udf"}
    return Reports(
        [
            Table(f"transform and {peer}", peer, [row(work, {"ours": times["ours"], "peer": times[name]})])
            for name, peer in peers.items()
        ]
    )
