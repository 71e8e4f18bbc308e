"""Where a run goes on within an epoch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hvd_cluster.estimators.run.snapshot import Running
from hvd_cluster.estimators.torch import checkpoint
from hvd_cluster.estimators.torch.train import _take_up


@pytest.mark.parametrize(("passes", "steps"), [(1, 3), (2, 2), (4, 0)])
def test_another_number_of_ranks_starts_at_a_whole_group_of_passes(passes, steps):
    """48 rows were 6 batches of one rank."""
    spec = SimpleNamespace(batch_size=8, backward_passes_per_step=passes)
    assert Running(48, [b""]).steps(spec, 2) == steps
    world = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
    running = checkpoint.Running(rows=48, sums=torch.tensor([[1.0, 48.0]]), random=[{}])
    assert _take_up(running, spec, world)[0] == steps
