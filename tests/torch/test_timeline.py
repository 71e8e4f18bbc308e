"""What a training step leaves in the timeline."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from hvd_cluster.engine.timeline.summary import BACKWARD, summarize
from hvd_cluster.engine.timeline.trace import read
from hvd_cluster.launch import local

STEPS = 4


def train() -> None:
    import hvd_cluster.torch as hvd

    hvd.init()
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))
    # However busy the machine: while one layer takes its time, the gradients of those behind it travel.
    model[2].register_full_backward_hook(lambda *_: time.sleep(0.1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.ones(64, 512)).square().mean().backward()
        optimizer.step()
    hvd.shutdown()


def test_each_backward_pass_is_shown_and_how_much_of_the_communication_it_hides(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    # A bucket of its own for each gradient: most of them are on their way before the backward pass has ended.
    env = {"OMP_NUM_THREADS": "1", "HOROVOD_TIMELINE": str(path), "HOROVOD_FUSION_THRESHOLD": "0"}
    local.run(train, num_proc=2, env=env)
    found = read(path)
    passes = [span for span in found.spans if span.name == BACKWARD]
    assert sorted(span.rank for span in passes) == [0] * STEPS + [1] * STEPS
    overlap = summarize(found).overlap
    assert set(overlap) == {0, 1}
    assert all(0 < share < 1 for share in overlap.values())


def augment(batch: torch.Tensor) -> torch.Tensor:
    """Rank 1 takes its time."""
    import hvd_cluster.torch as hvd

    time.sleep(0.05 * hvd.rank())
    return batch


def test_the_line_of_a_late_rank_is_in_the_timeline_without_the_monitor(tmp_path: Path) -> None:
    def fn() -> None:
        import hvd_cluster.torch as hvd

        hvd.init()
        hvd.start_timeline(str(tmp_path / "timeline.json"))
        model = torch.nn.Linear(4, 4)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
        for _ in range(20):
            optimizer.zero_grad()
            model(augment(torch.ones(2, 4))).sum().backward()
            optimizer.step()
        hvd.stop_timeline()
        hvd.shutdown()

    local.run(fn, num_proc=2, env={"OMP_NUM_THREADS": "1", "HOROVOD_TIMELINE": "DYNAMIC"})
    found = summarize(read(tmp_path / "timeline.json"))
    assert found.bottlenecks[0].rank == 1
    assert "augment (" in found.bottlenecks[0].call_site
    assert found.last_shares[1] > 0.5


@pytest.mark.slow
def test_a_barrier_of_torch_distributed_is_in_the_timeline(tmp_path: Path) -> None:
    def fn() -> None:
        import torch.distributed as dist

        import hvd_cluster.torch  # noqa: F401 - registers the backend

        dist.init_process_group("hvd")
        dist.barrier()
        dist.destroy_process_group()

    path = tmp_path / "timeline.json"
    local.run(fn, num_proc=2, env={"OMP_NUM_THREADS": "1", "HOROVOD_TIMELINE": str(path)})
    assert any("BARRIER" in span.name for span in read(path).spans)
