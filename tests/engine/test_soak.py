"""A great many small operations in random order give exact results; worlds that come and go leave nothing behind."""

from __future__ import annotations

import pytest
import torch
from random_operations import soak, used

from hvd_cluster.launch import local

ENV = {"OMP_NUM_THREADS": "1"}


@pytest.mark.slow
@pytest.mark.parametrize("shared_memory", ["1", "0"], ids=["shm", "gloo"])
def test_operations_of_all_kinds_in_random_order_are_exact(shared_memory: str) -> None:
    found = local.run(soak, (2_000,), num_proc=4, env={**ENV, "HOROVOD_SHARED_MEMORY": shared_memory})
    assert [done for done, _ in found] == [2_000] * 4


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_million_operations_in_random_order_are_exact() -> None:
    for done, grown in local.run(soak, (1_000_000,), num_proc=4, env=ENV):
        assert done == 1_000_000
        assert grown < 16


def come_and_go(num_cycles: int, warm_cycles: int) -> tuple[int, int, float]:
    """Growth of threads, descriptors and resident MiB between the warm cycles and the last one."""
    import hvd_cluster.torch as hvd

    before = used()
    for cycle in range(num_cycles):
        if cycle == warm_cycles:
            before = used()
        hvd.init()
        total = hvd.allreduce(torch.full((1000,), float(cycle)), op=hvd.Sum, name="x")
        assert total.sum().item() == 2000.0 * cycle
        hvd.shutdown()
    after = used()
    return after[0] - before[0], after[1] - before[1], after[2] - before[2]


@pytest.mark.slow
@pytest.mark.parametrize("shared_memory", ["1", "0"], ids=["shm", "gloo"])
def test_worlds_that_come_and_go_leave_nothing_behind(shared_memory: str) -> None:
    env = {**ENV, "HOROVOD_SHARED_MEMORY": shared_memory}
    for threads, descriptors, mib in local.run(come_and_go, (30, 10), num_proc=2, env=env):
        assert threads == 0
        assert descriptors <= 0
        assert mib < 4


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("shared_memory", ["1", "0"], ids=["shm", "gloo"])
def test_a_thousand_worlds_leave_nothing_behind(shared_memory: str) -> None:
    env = {**ENV, "HOROVOD_SHARED_MEMORY": shared_memory}
    for threads, descriptors, mib in local.run(come_and_go, (1000, 50), num_proc=2, env=env):
        assert threads == 0
        assert descriptors <= 0
        assert mib < 8
