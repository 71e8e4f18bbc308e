"""Autotune on real ranks: all of them change parameters at one place, and the training's numbers stay exact."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hvd_cluster.launch import local


def test_training_continues_exactly_while_all_ranks_change_parameters_together(tmp_path: Path) -> None:
    def fn(num_steps: int) -> int:
        import hvd_cluster.torch as hvd

        hvd.init()
        exact = 0
        for step in range(num_steps):
            tensors = [torch.full((1 + 500 * i,), float(step + hvd.rank())) for i in range(40)]
            handles = [hvd.allreduce_async_(tensor, op=hvd.Sum, name=f"g{i}") for i, tensor in enumerate(tensors)]
            for handle in handles:
                hvd.synchronize(handle)
            exact += all(torch.equal(tensor, torch.full_like(tensor, 3.0 * step + 3)) for tensor in tensors)
        hvd.shutdown()
        return exact

    log = tmp_path / "log.csv"
    # Reports up the tree; test_progress_lock.py has the votes.
    env = {"OMP_NUM_THREADS": "1", "HOROVOD_SHARED_MEMORY": "0"}
    env |= {"HOROVOD_AUTOTUNE": "1", "HOROVOD_AUTOTUNE_LOG": str(log)}
    assert local.run(fn, (60,), num_proc=3, env=env) == [60] * 3
    head, *lines = log.read_text().splitlines()
    assert head.endswith("cycle_time_ms,tensor_fusion_threshold,score")
    choices = [tuple(line.split(",")[4:6]) for line in lines]
    assert len(set(choices)) >= 3
    assert choices[-1] in choices[:-1], "the last line is the best of those before it"


@pytest.mark.slow
def test_the_buckets_of_an_optimizer_are_those_that_a_job_with_the_tuned_threshold_has(tmp_path: Path) -> None:
    def fn(num_steps: int) -> None:
        import hvd_cluster.torch as hvd

        hvd.init()
        model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(12)))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
        for _ in range(num_steps):
            optimizer.zero_grad()
            model(torch.ones(2, 256)).sum().backward()
            optimizer.step()
        hvd.shutdown()

    log = tmp_path / "log.csv"
    env = {"OMP_NUM_THREADS": "1", "HOROVOD_AUTOTUNE": "1", "HOROVOD_AUTOTUNE_LOG": str(log)}
    local.run(fn, (60,), num_proc=2, env=env)
    thresholds = [int(line.split(",")[5]) for line in log.read_text().splitlines()[1:]]
    assert len(thresholds) > 3
    # The second bucket may hold 2 MiB, and of layers of 257 KiB seven go into it.
    assert min(thresholds) >= 7 * 256 * 256 * 4
