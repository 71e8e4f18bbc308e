"""A net on forty columns: strings, bools, whole numbers with nulls, decimals and dates."""

from zlib import crc32

import data
import numpy as np
import torch

from hvd_cluster.estimators import TorchEstimator

START, YEAR = np.datetime64("2020-01-01"), np.timedelta64(365, "D")


def encode(batch):
    texts = [[crc32(str(text).encode()) % 16 for text in values] for values in batch.values() if values.dtype == object]
    years = [(values - START) / YEAR for values in batch.values() if values.dtype.kind == "M"]  # NaN for nulls
    numbers = [values.astype("float") / 100 for values in batch.values() if values.dtype.kind in "bif"]
    return np.hstack([*np.eye(16)[texts], np.nan_to_num(np.stack([*years, *numbers], axis=1))])


net = torch.nn.Sequential(torch.nn.Linear(10 * 16 + 30, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
estimator = TorchEstimator(model=net, optimizer=torch.optim.Adam(net.parameters(), lr=0.01), num_proc=2, epochs=20)
estimator.setLoss(torch.nn.functional.mse_loss).setPreprocess(encode).setLabelCols(["spent"])
train, test = data.shop()
scored = estimator.fit(train).transform(test)
print("error:", scored.selectExpr("avg(abs(spent - spent__output))").first()[0])
