# ruff: noqa: I001 - compat comes first: its import is what makes horovod resolve
"""Handwritten digits on the tasks of a Spark cluster, with Horovod's API:

    python examples/spark/torch_digits.py --num-proc 2

Without ``--master`` or ``--remote`` a small Spark is started on this machine.
"""

from __future__ import annotations

import argparse

import hvd_cluster.compat  # noqa: F401
import horovod.spark
from pyspark.sql import SparkSession


def train(epochs: int, batch_size: int) -> float:
    """What each worker does; the accuracy on the test set."""
    import horovod.torch as hvd
    import torch
    import torch.nn.functional as F
    from sklearn.datasets import load_digits

    hvd.init()
    torch.manual_seed(0)
    if torch.cuda.is_available():
        torch.cuda.set_device(hvd.local_rank())
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    mine, test = order[:1437][hvd.rank() :: hvd.size()], order[1437:]
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    steps = 1437 // hvd.size() // batch_size
    for epoch in range(epochs):
        for step in range(steps):
            batch = mine[step * batch_size : (step + 1) * batch_size]
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[batch]), y[batch])
            loss.backward()
            optimizer.step()
        if hvd.rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}")
    return float((model(x[test]).argmax(1) == y[test]).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description="handwritten digits with horovod.spark.run")
    parser.add_argument("--master", default="local[2]", help="of a classic session")
    parser.add_argument("--remote", default=None, help="of a Spark Connect session, for example sc://host:15002")
    parser.add_argument("--num-proc", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="of one worker")
    args = parser.parse_args()

    builder = SparkSession.builder.appName("digits")
    spark = builder.remote(args.remote).getOrCreate() if args.remote else builder.master(args.master).getOrCreate()
    found = horovod.spark.run(train, args=(args.epochs, args.batch_size), num_proc=args.num_proc)
    spark.stop()
    print(f"accuracy {found[0]:.3f} on {len(found)} workers")


if __name__ == "__main__":
    main()
