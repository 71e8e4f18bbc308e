"""What the monitor says of the GPUs of a host."""

from __future__ import annotations

import pytest
import torch

from hvd_cluster.monitor.node_usage import NodeMeter

pytestmark = pytest.mark.gpu


def test_the_memory_that_a_program_takes_is_in_the_usage_of_its_gpu() -> None:
    pytest.importorskip("pynvml")
    meter = NodeMeter()
    before = meter.measure()
    taken = torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
    after = meter.measure()
    assert len(after.gpu_percent) == len(after.gpu_memory_percent) >= 1
    more = [late - early for early, late in zip(before.gpu_memory_percent, after.gpu_memory_percent, strict=True)]
    total = torch.cuda.get_device_properties(0).total_memory
    assert max(more) == pytest.approx(100.0 * taken.nbytes / total, rel=0.2)
    assert all(0.0 <= busy <= 100.0 for busy in after.gpu_percent)
