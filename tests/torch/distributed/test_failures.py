"""A rank that dies, or that does not come, ends the calls of all others with an error."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from hvd_cluster.launch import local


@pytest.mark.parametrize("what", ["ddp", "fsdp2"])
def test_every_survivor_raises_when_a_rank_is_killed_in_the_middle_of_a_step(tmp_path: Path, what: str) -> None:
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

    with pytest.raises(Exception, match="rank"):
        local.run(fn, (str(tmp_path), what), num_proc=3, env={"OMP_NUM_THREADS": "1"})
    reports = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert set(reports) == {"0", "2"}
    for report in reports.values():
        assert float(report.split()[0]) < 10


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
