# ruff: noqa: I001 - compat comes first: its import is what makes horovod resolve
"""Handwritten digits on Spark tasks that may come and go, with Horovod's API:

    python examples/spark/elastic_digits.py --min-num-proc 1 --max-num-proc 2

Kill a worker, or an executor, while it runs.
"""

from __future__ import annotations

import argparse
from typing import Any

import hvd_cluster.compat  # noqa: F401
import horovod.spark
from pyspark.sql import SparkSession


def train(epochs: int) -> dict[str, Any]:
    """What each worker does."""
    import horovod.torch as hvd
    import torch
    import torch.nn.functional as F
    from sklearn.datasets import load_digits

    hvd.init()
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    sampler = hvd.elastic.ElasticSampler(range(len(x)), shuffle=True)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0)

    @hvd.elastic.run
    def fit(state: Any) -> None:
        while state.epoch < epochs:
            for number, batch in enumerate(torch.tensor(list(state.sampler)).split(32)):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x[batch]), y[batch])
                loss.backward()
                optimizer.step()
                state.sampler.record_batch(number, len(batch))
                if number % 10 == 9:
                    state.commit()
            if hvd.rank() == 0:
                print(f"epoch {state.epoch}: loss {loss.item():.3f} with {hvd.size()} workers")
            state.epoch += 1
            state.sampler.set_epoch(state.epoch)
            state.commit()

    fit(state)
    return {"accuracy": float((model(x).argmax(1) == y).float().mean()), "workers": hvd.size()}


def main() -> None:
    parser = argparse.ArgumentParser(description="handwritten digits with horovod.spark.run_elastic")
    parser.add_argument("--master", default="local[2]", help="of a classic session")
    parser.add_argument("--min-num-proc", type=int, default=1)
    parser.add_argument("--max-num-proc", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()

    spark = SparkSession.builder.appName("digits").master(args.master).getOrCreate()
    found = horovod.spark.run_elastic(
        train,
        args=(args.epochs,),
        num_proc=args.max_num_proc,
        min_num_proc=args.min_num_proc,
        max_num_proc=args.max_num_proc,
    )
    spark.stop()
    print(f"accuracy {found[0]['accuracy']:.3f} on {found[0]['workers']} workers")


if __name__ == "__main__":
    main()
