"""One rank on one GPU: DistributedOptimizer, a plain loop and DDP; batches that are copied ahead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.measure import Table, compare, row
from benchmarks.report import Reports
from hvd_cluster.launch import local

TITLE = "One rank on one GPU, against a plain loop"
DDP_TITLE = "One rank on one GPU, against DDP over NCCL"
COPY_TITLE = "Batches from memory to a GPU, copied one ahead"
NUM_BATCHES = 16

Times = dict[str, dict[str, list[float]]]


def training() -> dict[str, Times]:
    import torch
    import torch.distributed as dist

    import hvd_cluster.torch as hvd

    hvd.init()
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    device = torch.device("cuda", hvd.local_rank())
    torch.cuda.set_device(device)

    def mlp() -> torch.nn.Module:
        layers = [torch.nn.Linear(784, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 4096), torch.nn.ReLU()]
        return torch.nn.Sequential(*layers, torch.nn.Linear(4096, 10))

    def transformer() -> torch.nn.Module:
        layer = torch.nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
        return torch.nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)

    def step_of(make: Callable[[], torch.nn.Module], x: torch.Tensor, kind: str) -> Callable[[], None]:
        model = make().to(device)
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        if kind == "ours":
            optimizer = hvd.DistributedOptimizer(optimizer, list(model.named_parameters()))
        if kind == "ddp":
            model = torch.nn.parallel.DistributedDataParallel(model)

        def step() -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            torch.cuda.synchronize()

        return step

    found: dict[str, Times] = {"plain": {}, "ddp": {}}
    inputs = {"MLP": (mlp, torch.randn(256, 784)), "transformer": (transformer, torch.randn(16, 128, 512))}
    for what, (make, batch) in inputs.items():
        x = batch.to(device)
        ours = step_of(make, x, "ours")
        for kind, times in found.items():
            times[what] = compare(ours, step_of(make, x, kind), turns=15, per_turn=20)
    dist.destroy_process_group()
    hvd.shutdown()
    return found


def copies() -> Times:
    import torch

    from hvd_cluster.data.reading.to_device import ToDevice

    device = torch.device("cuda", 0)
    to_device = ToDevice(device)

    def images() -> list[dict[str, torch.Tensor]]:
        return [{"x": torch.randint(0, 256, (64, 3, 224, 224), dtype=torch.uint8)} for _ in range(NUM_BATCHES)]

    def rows(count: int) -> list[dict[str, torch.Tensor]]:
        return [{"x": torch.randn(count, 128)} for _ in range(NUM_BATCHES)]

    def convolutions() -> torch.nn.Module:
        layers: list[torch.nn.Module] = [torch.nn.Conv2d(3, 32, 3, stride=2), torch.nn.ReLU()]
        for channels in (32, 64, 128):
            layers += [torch.nn.Conv2d(channels, 2 * channels, 3, stride=2), torch.nn.ReLU()]
        return torch.nn.Sequential(*layers)

    def perceptron() -> torch.nn.Module:
        layers = [torch.nn.Linear(128, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1024), torch.nn.ReLU()]
        return torch.nn.Sequential(*layers, torch.nn.Linear(1024, 1))

    def epoch_of(model: Any, batches: Callable[[], Any], is_read: bool) -> Callable[[], None]:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)

        def epoch() -> None:
            for batch in batches():
                x = batch["x"].to(device).float()
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                if is_read:
                    loss.item()
            torch.cuda.synchronize()

        return epoch

    found = {}
    for what, data, make in [
        ("64 images of 3 x 224 x 224 bytes", images(), convolutions),
        ("1024 rows of 128 float32", rows(1024), perceptron),
        ("8192 rows of 128 float32", rows(8192), perceptron),
        ("65536 rows of 128 float32", rows(65536), perceptron),
    ]:
        for is_read in (False, True):
            ahead = epoch_of(make().to(device), lambda data=data: to_device(data), is_read)
            at_step = epoch_of(make().to(device), lambda data=data: data, is_read)
            label = f"{what}, {'the loss is read at each step' if is_read else 'no value is read'}"
            found[label] = compare(ahead, at_step, turns=9, per_turn=1)
    return found


def measure() -> Reports | None:
    """None where there is no GPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    trained = local.run(training, num_proc=1)[0]
    copied = local.run(copies, num_proc=1)[0]
    return Reports(
        [
            Table(TITLE, "a plain loop", [row(what, times) for what, times in trained["plain"].items()]),
            Table(DDP_TITLE, "DDP", [row(what, times) for what, times in trained["ddp"].items()]),
            Table(COPY_TITLE, "`.to(device)` at the step", [row(what, times) for what, times in copied.items()]),
        ]
    )
