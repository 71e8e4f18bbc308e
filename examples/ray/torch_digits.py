# ruff: noqa: I001 - compat comes first: its import is what makes horovod resolve
"""Handwritten digits on the actors of a Ray cluster, with Horovod's API:

    python examples/ray/torch_digits.py --num-workers 2

Without an address a small Ray cluster is started on this machine; ``--address auto`` joins one that runs.
"""

from __future__ import annotations

import argparse

import hvd_cluster.compat  # noqa: F401
import ray
from horovod.ray import RayExecutor


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
    steps = len(order[:1437]) // hvd.size() // batch_size
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
    parser = argparse.ArgumentParser(description="handwritten digits with horovod.ray")
    parser.add_argument("--address", default=None, help="of the Ray cluster; none starts one here")
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="of one worker")
    parser.add_argument("--use-gpu", action="store_true")
    args = parser.parse_args()

    ray.init(address=args.address)
    settings = RayExecutor.create_settings(timeout_s=120)
    executor = RayExecutor(settings, num_workers=args.num_workers, use_gpu=args.use_gpu)
    executor.start()
    found = executor.run(train, kwargs={"epochs": args.epochs, "batch_size": args.batch_size})
    executor.shutdown()
    print(f"accuracy {found[0]:.3f} on {len(found)} workers")


if __name__ == "__main__":
    main()
