"""A small convolutional net on a column of JPEG bytes."""

import io

import data
import numpy as np
import torch
from PIL import Image
from torch.nn import Conv2d, Flatten, Linear, MaxPool2d, ReLU, Sequential

from hvd_cluster.estimators import TorchEstimator


def pixels(batch):
    return [np.asarray(Image.open(io.BytesIO(jpeg)), "float32").transpose(2, 0, 1) / 255 for jpeg in batch["jpeg"]]


net = Sequential(Conv2d(3, 8, 3), ReLU(), MaxPool2d(2), Flatten(), Linear(8 * 49, 4))
estimator = TorchEstimator(model=net, optimizer=torch.optim.Adam(net.parameters(), lr=2e-3), num_proc=2, epochs=5)
estimator.setLoss(torch.nn.functional.cross_entropy).setPreprocess(pixels).setOutputKinds(["argmax"])
train, test = data.pictures()
scored = estimator.setFeatureCols(["jpeg"]).setLabelCols(["corner"]).fit(train).transform(test)
print("right:", scored.where("corner = corner__output").count() / test.count())
