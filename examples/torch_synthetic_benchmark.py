"""How many samples a second a model trains on, on generated data; start it with

horovodrun -np 2 python examples/torch_synthetic_benchmark.py --model mlp
"""

from __future__ import annotations

import argparse
import timeit

import horovod.torch as hvd
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

MODELS = {
    "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 512), nn.ReLU(), nn.Linear(512, 100)),
    "convnet": lambda: nn.Sequential(
        *(nn.Conv2d(3, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, 2, 1), nn.BatchNorm2d(64), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 100)),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="a synthetic benchmark of horovod.torch")
    parser.add_argument("--model", choices=sorted(MODELS), default="convnet")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--num-warmup-batches", type=int, default=5)
    parser.add_argument("--num-batches-per-iter", type=int, default=5)
    parser.add_argument("--num-iters", type=int, default=5)
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients as halves")
    args = parser.parse_args()

    hvd.init()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        torch.cuda.set_device(hvd.local_rank())
        device = torch.device("cuda", hvd.local_rank())
    model = MODELS[args.model]().to(device)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size()),
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    x = torch.randn(args.batch_size, 3, 32, 32, device=device)
    y = torch.randint(0, 100, (args.batch_size,), device=device)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    def log(text: str) -> None:
        if hvd.rank() == 0:
            print(text, flush=True)

    log(f"Model: {args.model}")
    log(f"Batch size: {args.batch_size}")
    log(f"Number of {device.type.upper()}s: {hvd.size()}")
    timeit.timeit(step, number=args.num_warmup_batches)
    rates = []
    for i in range(args.num_iters):
        rate = args.batch_size * args.num_batches_per_iter / timeit.timeit(step, number=args.num_batches_per_iter)
        log(f"Iter #{i}: {rate:.1f} img/sec per {device.type.upper()}")
        rates.append(rate)
    mean, spread = np.mean(rates), 1.96 * np.std(rates)
    log(f"Img/sec per {device.type.upper()}: {mean:.1f} +-{spread:.1f}")
    log(f"Total img/sec on {hvd.size()} {device.type.upper()}(s): {hvd.size() * mean:.1f} +-{hvd.size() * spread:.1f}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
