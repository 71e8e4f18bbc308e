"""Handwritten digits inside Ray Train, which starts the workers, restarts them and keeps checkpoints:

python examples/ray/train_digits.py --num-workers 2
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import ray
from ray.train import Checkpoint, RunConfig, ScalingConfig

from hvd_cluster.ray.train import HorovodTrainer


def train_loop(config: dict[str, Any]) -> None:
    import torch
    import torch.nn.functional as F
    from sklearn.datasets import load_digits

    import hvd_cluster.torch as hvd

    hvd.init()
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    mine, test = order[:1436][hvd.rank() :: hvd.size()], order[1437:]
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for epoch in range(config["epochs"]):
        for batch in mine.split(32):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
        accuracy = float((model(x[test]).argmax(1) == y[test]).float().mean())
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if hvd.rank() == 0:
                torch.save(model.state_dict(), Path(folder, "model.pt"))
                checkpoint = Checkpoint.from_directory(folder)
            ray.train.report({"epoch": epoch, "accuracy": accuracy, "workers": hvd.size()}, checkpoint=checkpoint)


def main() -> None:
    parser = argparse.ArgumentParser(description="handwritten digits inside Ray Train")
    parser.add_argument("--address", default=None, help="of the Ray cluster; none starts one here")
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--storage", default=None, help="a folder that all nodes see; a temporary one by default")
    args = parser.parse_args()

    ray.init(address=args.address)
    with tempfile.TemporaryDirectory() as folder:
        trainer = HorovodTrainer(
            train_loop,
            train_loop_config={"epochs": args.epochs},
            scaling_config=ScalingConfig(num_workers=args.num_workers),
            run_config=RunConfig(storage_path=args.storage or folder, name="digits"),
        )
        metrics = trainer.fit().metrics
    print(f"accuracy {metrics['accuracy']:.3f} on {metrics['workers']} workers")


if __name__ == "__main__":
    main()
