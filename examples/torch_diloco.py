"""Handwritten digits with DiLoCo: workers train apart in rounds of many steps, and exchange weights after each round:

    python examples/torch_diloco.py --epochs 10

With ``backend=SparkBackend(...)`` in place of ``num_proc``, the workers are on the hosts of a Spark cluster.
The data are scikit-learn's 1,797 digits of 8 x 8 pixels; nothing is downloaded.
"""

from __future__ import annotations

import argparse

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

from hvd_cluster.estimators import DiLoCo, TorchEstimator


def main() -> None:
    parser = argparse.ArgumentParser(description="handwritten digits, trained in rounds")
    parser.add_argument("--num-proc", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--every", type=int, default=16, help="steps of a round")
    args = parser.parse_args()

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    data = pd.DataFrame({"image": list((images / 16).astype("float32")), "digit": labels}).iloc[order]
    train, test = data[:1437], data[1437:]
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model = TorchEstimator(
        model=net,
        optimizer=torch.optim.AdamW(net.parameters(), lr=0.003),
        loss=F.cross_entropy,
        feature_cols=["image"],
        label_cols=["digit"],
        batch_size=32,
        epochs=args.epochs,
        num_proc=args.num_proc,
        scale_lr=False,
        communication=DiLoCo(every=args.every, outer_lr=0.7, outer_momentum=0.5),
        random_seed=0,
    ).fit(train)
    scored = model.setOutputKinds(["argmax"]).transform(test)
    right = scored["digit__output"] == scored["digit"]
    print(f"Accuracy: {100 * right.mean():.1f}% on {args.num_proc} workers")


if __name__ == "__main__":
    main()
