"""Ranks with a GPU each, which is not GPU 0 for all of them, and ranks with two GPUs."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

from hvd_cluster.launch import local

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="this machine has no two GPUs"),
]
ENV = {"OMP_NUM_THREADS": "1", "HOROVOD_GLOO_TIMEOUT_SECONDS": "30"}


def test_a_rank_uses_its_own_gpu_only() -> None:
    def fn() -> dict[str, Any]:
        import torch.distributed as dist

        import hvd_cluster.torch as hvd
        from hvd_cluster.engine import basics

        hvd.init()
        own = hvd.local_rank()
        torch.cuda.set_device(own)
        x = torch.arange(4.0, device="cuda") + own
        found: dict[str, Any] = {
            "transport": basics.engine().transport_name(0, x.device) if hvd.allreduce(x).is_cuda else "",
            "sum": hvd.synchronize(hvd.allreduce_async(x, op=hvd.Sum)).tolist(),
            "gathered": hvd.allgather(x).tolist(),
            "exchanged": hvd.alltoall(x, splits=[1, 3] if own else [2, 2])[0].tolist(),
        }
        net = torch.nn.Linear(4, 2).cuda()
        hvd.broadcast_parameters(net.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
        for _ in range(3):
            optimizer.zero_grad()
            net(x).sum().backward()
            optimizer.step()
        found["weights"] = [parameter.tolist() for parameter in net.parameters()]
        dist.init_process_group("hvd", device_id=torch.device("cuda", own))
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2).cuda(), device_ids=[own])
        for _ in range(3):
            model(x).sum().backward()
        found["gradients"] = [parameter.grad.tolist() for parameter in model.parameters()]
        gpus: list[int] = []

        def note(future: Any) -> Any:
            gpus.append(torch.cuda.current_device())
            return future.value()[0] * 2

        future: Any = dist.all_reduce(x.clone(), async_op=True).get_future()
        found["continued"] = future.then(note).then(lambda future: future.value() + 1).wait().tolist()
        found["is there"] = gpus == [own]
        dist.destroy_process_group()
        found["other context"] = torch._C._cuda_hasPrimaryContext(1 - own)
        hvd.shutdown()
        return found

    first, second = local.run(fn, num_proc=2, env=ENV)
    assert first.pop("exchanged") == [0.0, 1.0, 1.0]
    assert second.pop("exchanged") == [2.0, 3.0, 2.0, 3.0, 4.0]
    assert first == second
    assert first["transport"] == "NCCL"
    assert first["sum"] == [1.0, 3.0, 5.0, 7.0]
    assert first["gathered"] == [0.0, 1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 4.0]
    assert first["continued"] == [3.0, 7.0, 11.0, 15.0]
    assert (first["is there"], first["other context"]) == (True, False)


@pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed")
def test_lightnings_fsdp_strategy(tmp_path: Path) -> None:
    def fn(folder: str) -> tuple[str, list[float]]:
        # Lightning looks for MPI: mpi4py without one raises what it does not expect; Open MPI would start its daemon.
        sys.modules["mpi4py.MPI"] = None  # type: ignore[assignment]
        import lightning
        import torch.distributed as dist
        from lightning.pytorch.strategies import FSDPStrategy

        class Net(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.layer = torch.nn.Linear(4, 1)
                self.losses: list[float] = []

            def training_step(self, batch: Any, _: int) -> Any:
                loss = (self.layer(batch[0]) - 1).square().mean()
                self.losses.append(loss.item())
                return loss

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=0.1)

        torch.manual_seed(0)
        net = Net()
        data = torch.utils.data.TensorDataset(torch.randn(1, 4).expand(16, 4))
        trainer = lightning.Trainer(
            accelerator="gpu", devices=2, strategy=FSDPStrategy(process_group_backend="hvd"), max_epochs=2,
            default_root_dir=folder, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        )  # fmt: skip
        trainer.fit(net, torch.utils.data.DataLoader(data, batch_size=4))
        return dist.get_backend(), net.losses

    (backend, losses), other = local.run(fn, (str(tmp_path),), num_proc=2, env=ENV, torch_backend="hvd")
    assert (backend, losses) == other
    assert backend == "hvd"
    assert losses[-1] < losses[0]


def test_a_joined_rank_takes_part_on_the_gpu_of_its_tensors_without_having_selected_it() -> None:
    def fn() -> list[float]:
        import hvd_cluster.torch as hvd

        hvd.init()
        x = torch.ones(5, device=f"cuda:{hvd.local_rank()}")
        num_steps = 2 if hvd.rank() else 5
        found = [hvd.allreduce(x, op=hvd.Sum, name="uneven").mean().item() for _ in range(num_steps)]
        hvd.join()
        hvd.shutdown()
        return found

    assert local.run(fn, num_proc=2, env=ENV) == [[2.0, 2.0, 1.0, 1.0, 1.0], [2.0, 2.0]]


def test_ranks_reduce_tensors_of_two_gpus(transport: str) -> None:
    def fn(transport: str) -> list[str]:
        import hvd_cluster.torch as hvd

        if transport == "nccl":
            os.environ["NCCL_HOSTID"] = str(os.getpid())
        hvd.init()
        sides = [torch.cuda.Stream(gpu) for gpu in range(2)]
        wrong = []
        for turn in range(5):
            handles = {}
            for number in range(20):
                # The ranks need not have a tensor on GPUs of the same number.
                gpu = (number + hvd.rank()) % 2
                with torch.cuda.device(gpu), torch.cuda.stream(sides[gpu]):
                    torch.cuda._sleep(2_000_000)
                    tensor = torch.full((10_000 + number,), float(number + turn + hvd.rank()), device="cuda")
                    handles[number] = hvd.allreduce_async(tensor, op=hvd.Sum, name=f"many.{number}")
                    del tensor
            for number, handle in handles.items():
                gpu = (number + hvd.rank()) % 2
                with torch.cuda.device(gpu), torch.cuda.stream(sides[gpu]):
                    result = hvd.synchronize(handle)
                    if result.device.index != gpu or not bool((result == 2 * (number + turn) + 1).all()):
                        wrong.append(f"turn {turn}, tensor {number}: {result[:3]}")
        hvd.shutdown()
        return wrong

    assert local.run(fn, (transport,), num_proc=2, env=ENV) == [[], []]
