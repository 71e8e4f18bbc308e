# ruff: noqa: I001 - compat comes first: its import is what makes horovod resolve
"""Handwritten digits with the Lightning estimator on a Spark DataFrame, with Horovod's API:

    python examples/spark/lightning_estimator_digits.py --num-proc 2

Without ``--master`` or ``--remote`` a small Spark is started on this machine.
"""

from __future__ import annotations

import argparse

import hvd_cluster.compat  # noqa: F401
from horovod.spark.lightning import TorchEstimator
import lightning.pytorch as pl
import pandas as pd
from pyspark.sql import SparkSession
from sklearn.datasets import load_digits
import torch
import torch.nn.functional as F


class Digits(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.net(image)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return F.cross_entropy(self(batch["image"]), batch["digit"])

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        loss = F.cross_entropy(self(batch["image"]), batch["digit"])
        self.log("val_loss", loss, sync_dist=True, batch_size=len(batch["digit"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.004)


def main() -> None:
    parser = argparse.ArgumentParser(description="handwritten digits with horovod.spark.lightning")
    parser.add_argument("--master", default="local[2]", help="of a classic session")
    parser.add_argument("--remote", default=None, help="of a Spark Connect session, for example sc://host:15002")
    parser.add_argument("--num-proc", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=16, help="of one worker")
    args = parser.parse_args()

    builder = SparkSession.builder.appName("digits")
    spark = builder.remote(args.remote).getOrCreate() if args.remote else builder.master(args.master).getOrCreate()
    images, digits = load_digits(return_X_y=True)
    rows = pd.DataFrame({"image": (images / 16).tolist(), "digit": digits})
    train, test = (spark.createDataFrame(part) for part in (rows[:1437], rows[1437:]))
    estimator = TorchEstimator(
        model=Digits(),
        feature_cols=["image"],
        label_cols=["digit"],
        validation=0.1,
        callbacks=[pl.callbacks.ModelCheckpoint(monitor="val_loss")],
        output_kinds=["argmax"],
        num_proc=args.num_proc,
        epochs=args.epochs,
        batch_size=args.batch_size,
        verbose=0,
    )
    model = estimator.fit(train)
    for record in model.getHistory():
        print(f"epoch {record['epoch']}: loss {record['train']['loss']:.3f}")
    scored = model.transform(test).select("digit", "digit__output").collect()
    spark.stop()
    right = sum(row["digit"] == row["digit__output"] for row in scored)
    print(f"accuracy {right / len(scored):.3f} on {args.num_proc} workers")


if __name__ == "__main__":
    main()
