"""The same table, with Spark ML's StringIndexer for the strings, in one Pipeline."""

import data
import numpy as np
import torch
from pyspark.ml import Pipeline
from pyspark.ml.feature import StringIndexer

from hvd_cluster.estimators import TorchEstimator

START, YEAR = np.datetime64("2020-01-01"), np.timedelta64(365, "D")


def encode(batch):
    columns = [(values - START) / YEAR if values.dtype.kind == "M" else values / 10 for values in batch.values()]
    return np.nan_to_num(np.stack(columns, axis=1))


train, test = data.shop()
strings = [name for name, sql_type in train.dtypes if sql_type == "string"]
indexed = [f"{name}_index" for name in strings]
others = [name for name in train.columns if name not in [*strings, "spent"]]
net = torch.nn.Sequential(torch.nn.Linear(40, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
estimator = TorchEstimator(model=net, optimizer=torch.optim.Adam(net.parameters(), lr=0.02), num_proc=2, epochs=20)
estimator.setLoss(torch.nn.functional.mse_loss).setPreprocess(encode).setLabelCols(["spent"])
estimator.setFeatureCols([*indexed, *others])
indexer = StringIndexer(inputCols=strings, outputCols=indexed, handleInvalid="keep")
scored = Pipeline(stages=[indexer, estimator]).fit(train).transform(test)
print("error:", scored.selectExpr("avg(abs(spent - spent__output))").first()[0])
