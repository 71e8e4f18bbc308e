"""Allreduce between hosts that share no memory: network namespaces of this machine, so root alone can run these."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.hosts import Hosts, missing
from hvd_cluster.errors import WorkerFailedError

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

ENV = {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(2, rate_mbit=1000) as two_hosts:
        yield two_hosts


def every_kind() -> list[Any]:
    import torch

    import hvd_cluster.torch as hvd
    from hvd_cluster.engine import basics

    hvd.init()
    name = basics.engine().transport_name(0, torch.device("cpu"))
    total = sum(range(1, hvd.size() + 1))
    for length in (0, 1, 1000, 262_145, 3_000_001):
        for dtype in (torch.float32, torch.int64, torch.bfloat16):
            tensor = torch.full((length,), hvd.rank() + 1, dtype=dtype)
            hvd.allreduce_(tensor, name=f"{length} {dtype}", op=hvd.Sum)
            assert torch.equal(tensor, torch.full_like(tensor, total))
    mixed = [torch.full((length,), float(hvd.rank() + 1)) for length in (3_000_001, 5, 700_000, 0, 90_000)]
    for compression in (hvd.Compression.none, hvd.Compression.bf16, hvd.Compression.fp16):
        for op, wanted in ((hvd.Average, total / hvd.size()), (hvd.Max, hvd.size())):
            for result in hvd.grouped_allreduce(mixed, op=op, compression=compression, prescale_factor=2.0):
                assert result.dtype == torch.float32
                torch.testing.assert_close(result, torch.full_like(result, 2.0 * wanted), rtol=1e-2, atol=0.0)
    handles = [
        hvd.allreduce_async(torch.full((i + 1,), float(hvd.rank())), name=f"many {i}", op=hvd.Average)
        for i in range(50)
    ]
    for handle in handles:
        assert (hvd.synchronize(handle) == sum(range(hvd.size())) / hvd.size()).all()
    gathered = hvd.allgather(torch.tensor([hvd.rank()])).tolist()
    root = hvd.broadcast(torch.tensor(float(hvd.rank())), hvd.size() - 1).item()
    noise = torch.randn(500_000, generator=torch.Generator().manual_seed(hvd.rank()))
    bits = hvd.allreduce(noise, name="bits").view(torch.int32).sum().item()
    hvd.shutdown()
    return [name, gathered, root, bits]


@pytest.mark.parametrize(
    "ranks",
    [[3, 1], pytest.param([2, 2], marks=pytest.mark.slow), pytest.param([1, 2], marks=pytest.mark.slow)],
    ids=str,
)
def test_hosts_of_any_number_of_ranks_get_the_same_bits(hosts: Hosts, ranks: list[int]) -> None:
    results = hosts.run(every_kind, ranks=ranks, env=ENV)
    assert all(result == results[0] for result in results)
    size = sum(ranks)
    assert results[0][:3] == ["HIERARCHICAL", list(range(size)), size - 1.0]


def test_it_can_be_switched_off_and_has_no_use_for_single_ranks(hosts: Hosts) -> None:
    assert hosts.run(every_kind, ranks=[2, 1], env={**ENV, "HOROVOD_HIERARCHICAL_ALLREDUCE": "0"})[0][0] == "GLOO"
    assert hosts.run(every_kind, ranks=[1, 1], env=ENV)[0][0] == "GLOO"


@pytest.mark.parametrize(
    "victim",
    [pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.slow), 2],
    ids=["root", "no leader", "leader"],
)
def test_kill_9_in_mid_operation_is_an_error_on_every_survivor(hosts: Hosts, victim: int) -> None:
    def survive() -> None:
        import threading

        import torch

        import hvd_cluster.torch as hvd

        hvd.init()
        tensor = torch.ones(2_000_000)
        hvd.allreduce_(tensor, name="warm")
        if hvd.rank() == victim:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
        told = False
        while not told:
            try:
                hvd.allreduce_(tensor, name="loop")
            except hvd.HorovodInternalError:
                told = True
        hvd.shutdown()

    start_s = time.monotonic()
    with pytest.raises(WorkerFailedError) as caught:
        hosts.run(survive, ranks=[2, 2], env=ENV)
    assert caught.value.rank == victim
    assert caught.value.exit_code == -signal.SIGKILL
    assert time.monotonic() - start_s < 30
