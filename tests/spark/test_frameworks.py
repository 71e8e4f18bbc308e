"""What uses torch.distributed by itself runs under ``run`` unchanged, as it does under TorchDistributor."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

import hvd_cluster.spark

STEPS, LR = 5, 0.1


def _shard(rank: int, size: int) -> tuple[Any, Any]:
    """Rank's part of one small data set, 8 rows in all."""
    import torch

    x = torch.arange(16.0).reshape(8, 2) / 16
    y = x.sum(1, keepdim=True)
    return x[rank::size], y[rank::size]


def _model() -> Any:
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.linspace(-0.5, 0.5, parameter.numel()).reshape(parameter.shape) + index / 10)
    return model


def alone() -> list[float]:
    """The losses of one process that has all rows."""
    import torch

    model, (x, y) = _model(), _shard(0, 1)
    optimizer = torch.optim.SGD(model.parameters(), LR)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def with_ddp_and_fsdp2() -> list[list[float]]:
    """The mean losses over the ranks under DDP, then under FSDP2, in one default process group."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    x, y = _shard(dist.get_rank(), dist.get_world_size())
    curves = []
    for wrap in (DistributedDataParallel, fully_shard):
        model = wrap(_model())
        optimizer = torch.optim.SGD(model.parameters(), LR)
        losses = []
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            dist.all_reduce(total := loss.detach().clone())
            losses.append(total.item() / dist.get_world_size())
        curves.append(losses)
    dist.destroy_process_group()
    return curves


def with_accelerate() -> list[float]:
    """The mean losses over the ranks under Hugging Face Accelerate."""
    import torch
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = _model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), LR))
    x, y = _shard(accelerator.process_index, accelerator.num_processes)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    accelerator.end_training()
    return losses


def with_lightning(folder: str) -> list[float]:
    """The mean losses over the ranks under Lightning's own DDP."""
    import sys

    # Lightning looks for MPI: mpi4py without one raises what it does not expect; Open MPI would start its daemon.
    sys.modules["mpi4py.MPI"] = None  # type: ignore[assignment]
    import lightning as pl
    import torch

    class Fit(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.losses = _model(), []

        def training_step(self, batch: Any, index: int) -> Any:
            x, y = batch
            loss = torch.nn.functional.mse_loss(self.model(x), y)
            self.losses.append(self.all_gather(loss.detach()).mean().item())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), LR)

    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=STEPS,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    x, y = _shard(0, 1)
    module = Fit()
    rows = torch.utils.data.TensorDataset(x, y)
    trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=4))
    return module.losses


def _needs(package: str) -> None:
    if importlib.util.find_spec(package) is None:  # to import it would change this process's environment
        pytest.skip(f"{package} is not installed")


@pytest.mark.spark("local", "connect")
def test_ddp_and_fsdp2_learn_what_one_process_learns(spark: Any) -> None:
    curves = hvd_cluster.spark.run(with_ddp_and_fsdp2, num_proc=2)
    assert curves[0] == curves[1]
    for curve in curves[0]:
        assert curve == pytest.approx(alone(), rel=1e-5)


@pytest.mark.slow
@pytest.mark.spark("local", "local-cluster")
def test_accelerate_learns_what_one_process_learns(spark: Any) -> None:
    _needs("accelerate")
    for curve in hvd_cluster.spark.run(with_accelerate, num_proc=2):
        assert curve == pytest.approx(alone(), rel=1e-5)


@pytest.mark.slow
@pytest.mark.spark("local", "local-cluster")
def test_lightning_s_own_ddp_learns_what_one_process_learns(spark: Any, tmp_path: Any) -> None:
    _needs("lightning")
    for curve in hvd_cluster.spark.run(with_lightning, (str(tmp_path),), num_proc=2):
        assert curve == pytest.approx(alone(), rel=1e-5)
