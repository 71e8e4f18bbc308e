"""The same table, with Spark ML's StringIndexer for the strings, in one Pipeline."""

import data
import numpy as np
import torch
from pyspark.ml import Pipeline
from pyspark.ml.feature import StringIndexer

from hvd_cluster.estimators import TorchEstimator

START, YEAR = np.datetime64("2020-01-01"), np.timedelta64(365, "D")
train, test = data.shop()
strings = [name for name, sql_type in train.dtypes if sql_type == "string"]
indexed = [f"{name}_index" for name in strings]


def encode(batch):
    kinds = [np.eye(5)[batch[name].astype(int)] for name in indexed]
    years = [(values - START) / YEAR for values in batch.values() if values.dtype.kind == "M"]
    numbers = [batch[name] / 100 for name in batch if name not in indexed and batch[name].dtype.kind in "bif"]
    return np.hstack([*kinds, np.nan_to_num(np.stack([*years, *numbers], axis=1))])


net = torch.nn.Sequential(torch.nn.Linear(10 * 5 + 30, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
estimator = TorchEstimator(model=net, optimizer=torch.optim.Adam(net.parameters(), lr=0.01), num_proc=2, epochs=20)
estimator.setLoss(torch.nn.functional.mse_loss).setPreprocess(encode).setLabelCols(["spent"])
indexer = StringIndexer(inputCols=strings, outputCols=indexed, handleInvalid="keep")
scored = Pipeline(stages=[indexer, estimator]).fit(train).transform(test)
print("error:", scored.selectExpr("avg(abs(spent - spent__output))").first()[0])
