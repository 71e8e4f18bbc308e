# ruff: noqa: I001 - compat comes first: its import is what makes horovod resolve
"""Handwritten digits on Ray workers that may come and go, with Horovod's API:

    python examples/ray/elastic_digits.py --min-workers 1 --max-workers 2

Kill a node, or start one with ``ray start --address=...``, while it runs.
"""

from __future__ import annotations

import argparse
from typing import Any

import hvd_cluster.compat  # noqa: F401
import ray
from horovod.ray import ElasticRayExecutor


def training_fn() -> dict[str, Any]:
    import horovod.torch as hvd
    import torch
    import torch.nn.functional as F
    from horovod.ray import ray_logger
    from sklearn.datasets import load_digits

    hvd.init()
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, epoch=0)

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.epoch < 5:
            mine = torch.randperm(len(x), generator=torch.Generator().manual_seed(state.epoch))
            for batch in mine[: len(x) // hvd.size() * hvd.size()][hvd.rank() :: hvd.size()].split(64):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x[batch]), y[batch])
                loss.backward()
                optimizer.step()
            if hvd.rank() == 0:
                ray_logger.log({"epoch": state.epoch, "loss": loss.item(), "workers": hvd.size()})
            state.epoch += 1
            state.commit()

    train(state)
    return {"accuracy": float((model(x).argmax(1) == y).float().mean()), "workers": hvd.size()}


def main() -> None:
    parser = argparse.ArgumentParser(description="handwritten digits with elastic horovod.ray")
    parser.add_argument("--address", default=None, help="of the Ray cluster; none starts one here")
    parser.add_argument("--min-workers", type=int, default=1)
    parser.add_argument("--max-workers", type=int, default=2)
    args = parser.parse_args()

    ray.init(address=args.address)
    settings = ElasticRayExecutor.create_settings(
        min_num_proc=args.min_workers, max_num_proc=args.max_workers, verbose=True
    )
    executor = ElasticRayExecutor(settings, use_gpu=False, cpus_per_slot=1)
    executor.start()
    found = executor.run(training_fn, callbacks=[lambda info: print(f"logged {info}")])
    print(f"accuracy {found[0]['accuracy']:.3f} on {found[0]['workers']} workers")


if __name__ == "__main__":
    main()
