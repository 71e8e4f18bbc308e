# ruff: noqa: I001 - compat comes first: its import is what makes sparkdl and horovod resolve
"""Handwritten digits with HorovodRunner, as a Databricks notebook has it:

python examples/spark/horovod_runner_digits.py --np 2     # two tasks of a Spark session
python examples/spark/horovod_runner_digits.py --np -2    # two processes here, for debugging
"""

from __future__ import annotations

import argparse

import hvd_cluster.compat  # noqa: F401
from pyspark.sql import SparkSession
from sparkdl import HorovodRunner


def train(epochs: int) -> float:
    """What each worker does; the accuracy on all digits."""
    import horovod.torch as hvd
    import torch
    import torch.nn.functional as F
    from sklearn.datasets import load_digits
    from sparkdl.horovod import log_to_driver

    hvd.init()
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for epoch in range(epochs):
        mine = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        for batch in mine[: len(x) // hvd.size() * hvd.size()][hvd.rank() :: hvd.size()].split(32):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[batch]), y[batch])
            loss.backward()
            optimizer.step()
        if hvd.rank() == 0:
            log_to_driver(f"epoch {epoch}: loss {loss.item():.3f}")
    return float((model(x).argmax(1) == y).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description="handwritten digits with HorovodRunner")
    parser.add_argument("--np", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()

    if args.np > 0:
        SparkSession.builder.appName("digits").master(f"local[{args.np}]").getOrCreate()
    accuracy = HorovodRunner(np=args.np).run(train, epochs=args.epochs)
    print(f"accuracy {accuracy:.3f} on {abs(args.np)} workers")


if __name__ == "__main__":
    main()
