"""Accelerate, Hugging Face's Trainer and Lightning's strategies run unchanged on the group of the launcher."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from hvd_cluster.launch import local

ENV = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}


def needs(package: str) -> pytest.MarkDecorator:
    """Skips a test where ``package`` is missing; it is not imported here, because some change the environment."""
    return pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed")


def run(fn: Any, *args: Any) -> list[Any]:
    return local.run(fn, args, num_proc=2, env=ENV, torch_backend="hvd")


@needs("accelerate")
def test_accelerate_trains_and_gathers() -> None:
    def fn() -> Any:
        import torch
        import torch.distributed as dist
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        torch.manual_seed(0)
        net = torch.nn.Linear(4, 1)
        data = torch.utils.data.TensorDataset(torch.arange(32.0).view(8, 4), torch.ones(8, 1))
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
        model, optimizer, loader = accelerator.prepare(net, optimizer, torch.utils.data.DataLoader(data, batch_size=2))
        for x, y in loader:
            optimizer.zero_grad()
            accelerator.backward((model(x) - y).square().mean())
            optimizer.step()
        weights = accelerator.gather(model.module.weight.detach())
        backend, ranks = dist.get_backend(), accelerator.gather(torch.tensor([accelerator.process_index]))
        return type(model).__name__, backend, ranks.tolist(), torch.equal(*weights)

    assert run(fn) == [("DistributedDataParallel", "hvd", [0, 1], True)] * 2


@pytest.mark.slow
@needs("transformers")
def test_hugging_faces_trainer(tmp_path: Path) -> None:
    def fn(folder: str) -> Any:
        import torch
        import torch.distributed as dist
        from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
        )
        model = BertForSequenceClassification(config)
        rows = [{"input_ids": torch.arange(6) + row % 8, "labels": row % 2} for row in range(32)]
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=4, max_steps=4, report_to=[], use_cpu=True, save_strategy="no"
        )
        trainer = Trainer(model, arguments, train_dataset=rows)
        trainer.train()
        weight = model.classifier.weight.detach().clone()
        weights = [torch.empty_like(weight) for _ in range(2)]
        dist.all_gather(weights, weight)
        return arguments.world_size, dist.get_backend(), torch.equal(*weights)

    assert run(fn, str(tmp_path)) == [(2, "hvd", True)] * 2


@pytest.mark.slow
@needs("lightning")
@pytest.mark.parametrize(
    ("name", "options"),
    [("DDPStrategy", {}), ("ModelParallelStrategy", {"data_parallel_size": 2, "tensor_parallel_size": 1})],
)
def test_lightnings_strategies(tmp_path: Path, name: str, options: dict[str, int]) -> None:
    """Lightning refuses its FSDPStrategy on CPUs: tests/gpu has it."""

    def fn(folder: str, name: str, options: dict[str, int]) -> Any:
        import sys

        # Lightning looks for MPI: mpi4py without one raises what it does not expect; Open MPI would start its daemon.
        sys.modules["mpi4py.MPI"] = None  # type: ignore[assignment]
        import lightning
        import torch
        import torch.distributed as dist
        from lightning.pytorch import strategies
        from torch.distributed.fsdp import fully_shard

        class Net(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.layer = torch.nn.Linear(4, 1)

            def configure_model(self) -> None:
                if name == "ModelParallelStrategy":
                    fully_shard(self.layer, mesh=self.device_mesh["data_parallel"])

            def training_step(self, batch: Any, _: int) -> Any:
                loss = (self.layer(batch[0]) - 1).square().mean()
                self.log("loss", loss, sync_dist=True)
                return loss

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=0.01)

        torch.manual_seed(0)
        net, rows = Net(), torch.randn(16, 4)
        alone = torch.nn.Linear(4, 1)
        alone.load_state_dict(net.layer.state_dict())
        optimizer = torch.optim.SGD(alone.parameters(), lr=0.01)
        for batch in rows.split(8):
            optimizer.zero_grad()
            (alone(batch) - 1).square().mean().backward()
            optimizer.step()
        trainer = lightning.Trainer(
            accelerator="cpu", devices=2, max_epochs=1, default_root_dir=folder, logger=False,
            strategy=getattr(strategies, name)(process_group_backend="hvd", **options),
            enable_checkpointing=False, enable_progress_bar=False, use_distributed_sampler=False,  # which shuffles
        )  # fmt: skip
        own = torch.utils.data.TensorDataset(rows.view(2, 2, 4, 4)[:, dist.get_rank()].reshape(8, 4))
        trainer.fit(net, torch.utils.data.DataLoader(own, batch_size=4))
        weight: Any = net.layer.weight.detach()
        is_divided = hasattr(weight, "to_local")
        held = weight.to_local().numel() if is_divided else weight.numel()
        torch.testing.assert_close(weight.full_tensor() if is_divided else weight, alone.weight.detach())
        return trainer.world_size, dist.get_backend(), held

    found = run(fn, str(tmp_path), name, options)
    assert [each[:2] for each in found] == [(2, "hvd")] * 2
    assert sum(held for *_, held in found) == (4 if options else 8)
