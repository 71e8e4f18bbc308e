"""DDP, FSDP2 and what is built on them train to the losses that they reach on Gloo."""

from __future__ import annotations

from typing import Any

import pytest


def losses(dist: Any, wrap: Any, group: Any, *, steps: int = 6, momentum: float = 0.9) -> list[float]:
    import torch

    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 33), torch.nn.ReLU(), torch.nn.Linear(33, 5)
    )
    model = wrap(net, group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    generator = torch.Generator().manual_seed(dist.get_rank())
    found = []
    for _ in range(steps):
        x = torch.randn(16, 20, generator=generator)
        y = torch.randint(0, 5, (16,), generator=generator)
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def test_ddp_reaches_gloos_losses(trio: Any) -> None:
    def fn(dist: Any, gloo: Any) -> tuple[list[float], list[float]]:
        import torch

        def ddp(net: Any, group: Any) -> Any:
            return torch.nn.parallel.DistributedDataParallel(net, process_group=group, bucket_cap_mb=0.005)

        return losses(dist, ddp, None), losses(dist, ddp, gloo)

    for ours, theirs in trio(fn):
        assert ours == pytest.approx(theirs, rel=1e-6)


def test_ddp_with_communication_hooks(pair: Any) -> None:
    def fn(dist: Any, gloo: Any) -> Any:
        import torch
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        def hooked(hook: Any, state: Any) -> Any:
            def wrap(net: Any, group: Any) -> Any:
                model = torch.nn.parallel.DistributedDataParallel(net, process_group=group)
                model.register_comm_hook(state(group), hook)
                return model

            return wrap

        def power(group: Any) -> Any:
            return powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=2, start_powerSGD_iter=2)

        pairs = []
        for hook, state in (
            (default_hooks.allreduce_hook, lambda group: group),
            (default_hooks.fp16_compress_hook, lambda group: group),
            (powerSGD_hook.powerSGD_hook, power),
        ):
            wrap = hooked(hook, state)
            pairs.append((losses(dist, wrap, None), losses(dist, wrap, gloo)))
        return pairs

    for pairs in pair(fn):
        for ours, theirs in pairs:
            assert ours == pytest.approx(theirs, rel=1e-3)


def test_replicas_stay_equal_when_hooks_of_several_buckets_communicate_again(trio: Any) -> None:
    def fn(dist: Any, gloo: Any) -> list[list[float]]:
        import torch
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        torch.manual_seed(0)
        net = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])
        model = torch.nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.02)
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        generator = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(30):
            optimizer.zero_grad()
            model(torch.randn(8, 64, generator=generator)).square().mean().backward()
            optimizer.step()
        return [parameter.flatten().tolist() for parameter in model.parameters()]

    weights = trio(fn)
    assert weights[0] == weights[1] == weights[2]


def test_ddp_with_sparse_embeddings_buffers_and_unused_parameters(pair: Any) -> None:
    def fn(dist: Any, gloo: Any) -> Any:
        import torch

        class Net(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.table = torch.nn.Embedding(30, 8, sparse=True)
                self.norm = torch.nn.BatchNorm1d(8)
                self.sometimes = torch.nn.Linear(8, 8)

            def forward(self, x: Any) -> Any:
                h = self.norm(self.table(x))
                return self.sometimes(h).sum() if x[0] % 2 else h.square().sum()

        found = []
        for group in (None, gloo):
            torch.manual_seed(0)
            model = torch.nn.parallel.DistributedDataParallel(Net(), process_group=group, find_unused_parameters=True)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            for step in range(4):
                optimizer.zero_grad()
                model(torch.arange(6) + step + dist.get_rank()).backward()
                optimizer.step()
            found.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
        torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)
        return True

    assert pair(fn) == [True, True]


def test_fsdp2_reaches_gloos_losses(trio: Any) -> None:
    def fn(dist: Any, gloo: Any) -> Any:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        def sharded(net: Any, group: Any) -> Any:
            mesh = DeviceMesh.from_group(group or dist.distributed_c10d._get_default_group(), "cpu")
            for layer in net:
                if list(layer.parameters()):
                    fully_shard(layer, mesh=mesh)
            return fully_shard(net, mesh=mesh)

        return losses(dist, sharded, None), losses(dist, sharded, gloo)

    for ours, theirs in trio(fn):
        assert ours == pytest.approx(theirs, rel=1e-6)


def test_zero_redundancy_optimizer_and_distributed_checkpoint(pair: Any, tmp_path: Any) -> None:
    def fn(dist: Any, gloo: Any, folder: str) -> Any:
        import torch
        import torch.distributed.checkpoint as dcp
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.optim import ZeroRedundancyOptimizer

        torch.manual_seed(0)
        net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(6, 3))
        optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.Adam, lr=0.1)
        net(torch.ones(2, 6) * (dist.get_rank() + 1)).sum().backward()
        optimizer.step()
        weights = [torch.empty(3, 6) for _ in range(2)]
        dist.all_gather(weights, net.module.weight.detach())
        assert torch.equal(*weights)
        torch.manual_seed(dist.get_rank())
        saved, loaded = (fully_shard(torch.nn.Linear(6, 4)) for _ in range(2))
        dcp.save({"weight": saved.weight}, checkpoint_id=folder)
        dcp.load({"weight": loaded.weight}, checkpoint_id=folder)
        return torch.equal(saved.weight.full_tensor(), loaded.weight.full_tensor())

    assert pair(fn, str(tmp_path / "checkpoint")) == [True, True]
