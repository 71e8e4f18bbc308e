"""A rank that dies, or that does not come, ends the calls of all others with an error."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from hvd_cluster.errors import WorkerFailedError
from hvd_cluster.launch import local

#: For more kills: KILLS=50 SEED=1 pytest -m slow FILE
NUM_KILLS = int(os.environ.get("KILLS", "8"))
SEED = int(os.environ.get("SEED", "1"))
over_each_transport = pytest.mark.parametrize("shares_memory", ["1", "0"], ids=["shm", "gloo"])


@over_each_transport
@pytest.mark.parametrize("what", ["ddp", "fsdp2"])
def test_every_survivor_raises_when_a_rank_is_killed_in_the_middle_of_a_step(
    tmp_path: Path, what: str, shares_memory: str
) -> None:
    def fn(folder: str, what: str) -> None:
        import time

        import torch
        import torch.distributed as dist

        import hvd_cluster.torch  # noqa: F401 - registers the backend

        dist.init_process_group("hvd")
        rank = dist.get_rank()
        net: Any = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)])
        if what == "ddp":
            net = torch.nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.3)
        else:
            from torch.distributed.fsdp import fully_shard

            for layer in net:
                fully_shard(layer)
            fully_shard(net)
        began_s = 0.0
        try:
            for step in range(1000):
                began_s = time.monotonic()
                if step == 3 and rank == 1:
                    inner = net.module if what == "ddp" else net
                    inner[2].register_full_backward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
                net(torch.randn(8, 256)).sum().backward()
        except RuntimeError as error:
            Path(folder, str(rank)).write_text(f"{time.monotonic() - began_s:.1f} {error}")
            raise

    env = {"OMP_NUM_THREADS": "1", "HOROVOD_SHARED_MEMORY": shares_memory}
    with pytest.raises(Exception, match="rank"):
        local.run(fn, (str(tmp_path), what), num_proc=3, env=env)
    reports = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert set(reports) == {"0", "2"}
    for report in reports.values():
        assert float(report.split()[0]) < 10


@pytest.mark.slow
@pytest.mark.timeout(60 + 30 * NUM_KILLS)
@over_each_transport
def test_every_survivor_raises_whenever_in_a_step_a_rank_is_killed(tmp_path: Path, shares_memory: str) -> None:
    def fn(folder: str, what: str, victim: int, delay_s: float) -> None:
        import threading
        import time

        import torch
        import torch.distributed as dist

        import hvd_cluster.torch  # noqa: F401 - registers the backend

        dist.init_process_group("hvd")
        rank = dist.get_rank()
        net: Any = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(6)])
        if what == "ddp":
            net = torch.nn.parallel.DistributedDataParallel(net, bucket_cap_mb=1)
        else:
            from torch.distributed.fsdp import fully_shard

            for layer in net:
                fully_shard(layer)
            fully_shard(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)

        def die() -> None:
            Path(folder, f"{rank}.killed").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)

        try:
            for step in range(10_000):
                if step == 3 and rank == victim:
                    threading.Timer(delay_s, die).start()
                net(torch.randn(64, 512)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        except RuntimeError:
            Path(folder, f"{rank}.raised").write_text(str(time.time()))
            raise

    env = {"OMP_NUM_THREADS": "1", "HOROVOD_SHARED_MEMORY": shares_memory}
    generator = random.Random(f"{SEED} {shares_memory}")
    for number in range(int(shares_memory), NUM_KILLS, 2):  # half of the kills over each
        what, victim, delay_s = ("ddp", "fsdp2")[number // 2 % 2], generator.randrange(3), generator.uniform(0.0, 0.2)
        folder = tmp_path / str(number)
        folder.mkdir()
        with pytest.raises(WorkerFailedError, match="SIGKILL"):
            local.run(fn, (str(folder), what, victim, delay_s), num_proc=3, env=env)
        times = {path.name: float(path.read_text()) for path in folder.iterdir()}
        killed_at = times.pop(f"{victim}.killed")
        assert set(times) == {f"{rank}.raised" for rank in range(3) if rank != victim}
        assert max(times.values()) - killed_at < 10


@pytest.mark.slow
def test_a_call_that_outlives_the_timeout_fails_on_all_ranks(tmp_path: Path) -> None:
    def fn() -> tuple[str, bool]:
        import time
        from datetime import timedelta

        import torch
        import torch.distributed as dist

        import hvd_cluster.torch  # noqa: F401 - registers the backend

        dist.init_process_group("hvd", timeout=timedelta(seconds=2))
        dist.barrier()
        texts = []
        try:
            if dist.get_rank() == 0:
                dist.all_reduce(torch.ones(3))
            else:
                time.sleep(4)
                dist.all_reduce(torch.ones(4))
        except RuntimeError as error:
            texts.append(str(error))
        return texts[
            0
        ], "the timeout of the call, for other ranks to call torch group 0: allreduce float32[3]" in texts[0]

    for text, is_explained in local.run(fn, num_proc=2, env={"OMP_NUM_THREADS": "1"}):
        assert is_explained, text


@pytest.mark.slow
@over_each_transport
@pytest.mark.parametrize("what", ["gather", "scatter", "alltoall, fewer", "alltoall, more"])
def test_sizes_that_do_not_fit_raise_on_all_ranks(what: str, shares_memory: str) -> None:
    def fn(what: str) -> str:
        from datetime import timedelta

        import torch
        import torch.distributed as dist

        import hvd_cluster.torch  # noqa: F401 - registers the backend

        dist.init_process_group("hvd", timeout=timedelta(seconds=2))
        rank = dist.get_rank()
        dist.barrier()
        try:
            if what == "gather":
                parts = [torch.empty(4), torch.empty(4)]
                dist.gather(torch.ones(4 - rank), parts if rank == 0 else None)
            elif what == "scatter":
                dist.scatter(torch.empty(4 + rank), [torch.ones(4)] * 2 if rank == 0 else None)
            else:  # rank 0 sends 2 elements to rank 1
                expected = [2, 2] if rank == 0 else [5, 2] if what == "alltoall, fewer" else [1, 2]
                dist.all_to_all_single(torch.empty(sum(expected)), torch.ones(4), expected, [2, 2])
            dist.barrier()
        except RuntimeError as error:
            return str(error)
        return "no error"

    env = {"OMP_NUM_THREADS": "1", "HOROVOD_SHARED_MEMORY": shares_memory}
    for text in local.run(fn, (what,), num_proc=2, env=env):
        if what.startswith("alltoall"):
            assert "rank 0 sends 8 bytes to rank 1, which expects" in text
        else:
            assert "the timeout of the call" in text


def test_wait_with_a_timeout_leaves_the_call_in_progress(pair: Any) -> None:
    def fn(dist: Any, gloo: Any) -> tuple[bool, float]:
        from datetime import timedelta

        import torch

        tensor = torch.ones(2)
        raised = False
        if dist.get_rank() == 0:
            work = dist.all_reduce(tensor, async_op=True)
            try:
                work.wait(timedelta(seconds=0.2))
            except RuntimeError:
                raised = True
            dist.barrier(group=gloo)
        else:
            dist.barrier(group=gloo)
            work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        return raised, float(tensor[0])

    assert pair(fn) == [(True, 2.0), (False, 2.0)]
