"""One rank on one GPU: a training loop with DistributedOptimizer against the same loop without."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.measure import Table, compare, row
from benchmarks.report import Report, Reports
from hvd_cluster.launch import local

TITLE = "One rank on one GPU, against a plain loop"


def worker() -> dict[str, dict[str, list[float]]]:
    import torch

    import hvd_cluster.torch as hvd

    hvd.init()
    device = torch.device("cuda", hvd.local_rank())
    torch.cuda.set_device(device)

    def mlp() -> torch.nn.Module:
        layers = [torch.nn.Linear(784, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 4096), torch.nn.ReLU()]
        return torch.nn.Sequential(*layers, torch.nn.Linear(4096, 10))

    def transformer() -> torch.nn.Module:
        layer = torch.nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
        return torch.nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)

    found = {}
    inputs = {"MLP": (mlp, torch.randn(256, 784)), "transformer": (transformer, torch.randn(16, 128, 512))}
    for what, (make, batch) in inputs.items():
        x = batch.to(device)

        def step_of(model: torch.nn.Module, is_ours: bool, x: torch.Tensor = x) -> Callable[[], None]:
            optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            if is_ours:
                optimizer = hvd.DistributedOptimizer(optimizer, list(model.named_parameters()))

            def step() -> None:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
                torch.cuda.synchronize()

            return step

        ours, plain = step_of(make().to(device), True), step_of(make().to(device), False)
        found[what] = compare(ours, plain, turns=15, per_turn=20)
    hvd.shutdown()
    return found


def measure() -> Reports:
    import torch

    if not torch.cuda.is_available():
        return Reports([Report(TITLE, ("not measured",), [["this machine has no CUDA GPU"]])])
    found = local.run(worker, num_proc=1)[0]
    return Reports([Table(TITLE, "a plain loop", [row(what, times) for what, times in found.items()])])
