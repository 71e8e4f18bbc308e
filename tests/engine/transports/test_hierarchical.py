"""Allreduce between hosts that share no memory: network namespaces of this machine, so root alone can run these."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from random_operations import soak

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
    # Each type is a reduction of its own, and all of them go through the same buffers of the host.
    lengths = {torch.float32: 300_000, torch.float64: 200_001, torch.int16: 700_000, torch.bool: 1_200_000}
    for op, whole in ((hvd.Sum, torch.sum), (hvd.Min, torch.amin), (hvd.Product, torch.prod)):
        by_rank = [
            [(torch.arange(length) % 3 + rank).to(dtype) for dtype, length in lengths.items()]
            for rank in range(hvd.size())
        ]
        results = hvd.grouped_allreduce(by_rank[hvd.rank()], op=op)
        for result, tensors in zip(results, zip(*by_rank, strict=True), strict=True):
            wanted = whole(torch.stack(tensors).to(torch.int64), dim=0)
            assert torch.equal(result, wanted.to(result.dtype)), (op, result.dtype)
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
    is_homogeneous = hvd.is_homogeneous()
    hvd.shutdown()
    return [name, gathered, root, bits, is_homogeneous]


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
    assert results[0][4] == (len(set(ranks)) == 1)


@pytest.mark.slow
def test_it_can_be_switched_off_and_has_no_use_for_single_ranks(hosts: Hosts) -> None:
    assert hosts.run(every_kind, ranks=[2, 1], env={**ENV, "HOROVOD_HIERARCHICAL_ALLREDUCE": "0"})[0][0] == "GLOO"
    assert hosts.run(every_kind, ranks=[1, 1], env=ENV)[0][0] == "GLOO"


def overlapping_sets() -> list[float]:
    import torch

    import hvd_cluster.torch as hvd

    some = hvd.ProcessSet([0, 1, 3, 4])
    hvd.init(process_sets=[some])
    sums = []
    for step in range(5):
        tensors = [torch.ones(1_000_000), torch.ones(1_000_000)]
        handles = [hvd.allreduce_async_(tensors[0], name=f"all {step}", op=hvd.Sum)]
        if some.included():
            handles.append(hvd.allreduce_async_(tensors[1], name=f"some {step}", op=hvd.Sum, process_set=some))
        for handle in handles:
            hvd.synchronize(handle)
        sums += [tensor[-1].item() for tensor in tensors]
    big = torch.ones(4_000_000)
    handle = hvd.allreduce_async_(big, name="beside", op=hvd.Sum)
    later = hvd.add_process_set([0, 1, 5])
    hvd.synchronize(handle)
    sums.append(big[0].item())
    sums.append(hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=later).item() if later.included() else 0.0)
    hvd.barrier()  # who is not in the last set would end the world
    hvd.shutdown()
    return sums


@pytest.mark.slow
def test_buckets_of_overlapping_process_sets_do_not_wait_for_each_other_in_a_ring(hosts: Hosts) -> None:
    env = {**ENV, "HOROVOD_GLOO_TIMEOUT_SECONDS": "10", "HOROVOD_DYNAMIC_PROCESS_SETS": "1"}
    for rank, sums in enumerate(hosts.run(overlapping_sets, ranks=[3, 3], env=env)):
        assert sums[:10] == [6.0, 4.0 if rank in (0, 1, 3, 4) else 1.0] * 5
        assert sums[10:] == [6.0, 3.0 if rank in (0, 1, 5) else 0.0]


def sets_within_hosts() -> tuple[str, list[float]]:
    """What waits for ranks of this host and what waits for other hosts, under way at once, in another order each."""
    import random

    import torch

    import hvd_cluster.torch as hvd
    from hvd_cluster.engine import basics

    sets = [hvd.ProcessSet([0, 1]), hvd.ProcessSet([2, 3]), hvd.ProcessSet([1, 2])]
    hvd.init(process_sets=sets)
    mine = [hvd.global_process_set, *(one for one in sets if one.included())]
    sums = []
    for step in range(20):
        orders = random.Random(100 * step + hvd.rank())
        tensors = {one.process_set_id: torch.ones(400_000) for one in orders.sample(mine, len(mine))}
        handles = [
            hvd.allreduce_async_(tensor, name=f"x {step % 3}", op=hvd.Sum, process_set=one)
            for id, tensor in tensors.items()
            for one in mine
            if one.process_set_id == id
        ]
        for handle in orders.sample(handles, len(handles)):
            hvd.synchronize(handle)
        sums += [tensors[one.process_set_id][-1].item() for one in mine]
    name = basics.engine().transport_name(mine[1].process_set_id, torch.device("cpu"))
    hvd.barrier()
    hvd.shutdown()
    return name, sums


@pytest.mark.slow
def test_sets_within_a_host_share_its_memory_and_do_not_wait_in_a_ring_with_the_others(hosts: Hosts) -> None:
    env = {**ENV, "HOROVOD_GLOO_TIMEOUT_SECONDS": "20"}
    for rank, (name, sums) in enumerate(hosts.run(sets_within_hosts, ranks=[2, 2], env=env)):
        assert name == "SHM"
        assert sums == ([4.0, 2.0, 2.0] if rank in (1, 2) else [4.0, 2.0]) * 20


@pytest.mark.parametrize(
    ("ranks", "env"),
    [
        ([2, 2], {}),
        pytest.param([3, 1], {}, marks=pytest.mark.slow),
        pytest.param([1, 3], {}, marks=pytest.mark.slow),
        pytest.param([2, 2], {"HOROVOD_SHARED_MEMORY": "0"}, marks=pytest.mark.slow),
        pytest.param([2, 2], {"HOROVOD_CACHE_CAPACITY": "100"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_operations_of_all_kinds_in_random_order_are_exact(hosts: Hosts, ranks: list[int], env: dict[str, str]) -> None:
    found = hosts.run(soak, (2_000,), ranks=ranks, env={**ENV, **env})
    assert [done for done, _ in found] == [2_000] * 4


@pytest.mark.slow
def test_the_pieces_of_a_large_host_are_those_of_a_small_one(hosts: Hosts) -> None:
    def crowded() -> list[Any]:
        from hvd_cluster.engine.transports import exchange

        exchange._MAX_BYTES = 1 << 20  # so that three ranks have room for less than one
        return every_kind()

    results = hosts.run(crowded, ranks=[3, 1], env=ENV)
    assert all(result == results[0] for result in results)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "told_beside_it"),
    [
        ("gather", "rank 0 of this host did not come to a collective within 4 s"),
        ("announce", "rank 0 of this host did not bring what other hosts have sent within 8 s"),
    ],
)
def test_a_leader_that_is_stopped_is_an_error_on_the_other_ranks_of_its_host_too(
    hosts: Hosts, tmp_path: Path, where: str, told_beside_it: str
) -> None:
    def fn() -> None:
        import torch

        import hvd_cluster.torch as hvd
        from hvd_cluster.engine.transports.exchange import HostExchange

        hvd.init()
        tensor = torch.ones(4_000_000)  # more pieces than are sent before the first is announced
        hvd.allreduce_(tensor, name="warm")
        if hvd.rank() == 0:
            # Amid an operation: one that is stopped between two of them is the stall inspector's.
            setattr(HostExchange, where, lambda *_: os.kill(os.getpid(), signal.SIGSTOP))
        try:
            while True:
                hvd.allreduce_(tensor, name="loop")
        except hvd.HorovodInternalError as error:
            (tmp_path / f"told.{hvd.rank()}").write_text(str(error))
            # The launcher ends the others once one has raised: not before all have been told.
            deadline_s = time.monotonic() + 30
            while len(list(tmp_path.glob("told.*"))) < 3 and time.monotonic() < deadline_s:
                time.sleep(0.1)
            raise

    with pytest.raises(WorkerFailedError):
        hosts.run(fn, ranks=[2, 2], env={**ENV, "HOROVOD_GLOO_TIMEOUT_SECONDS": "4"})
    told = {path.name: path.read_text() for path in tmp_path.glob("told.*")}
    assert sorted(told) == ["told.1", "told.2", "told.3"]
    assert told_beside_it in told["told.1"]


@pytest.mark.slow
@pytest.mark.parametrize("culprit", [0, 1], ids=["leader", "no leader"])
@pytest.mark.parametrize("ends", ["raises", "shuts down"])
def test_an_end_with_operations_under_way_is_an_error_on_the_others(hosts: Hosts, culprit: int, ends: str) -> None:
    def fn() -> str:
        import torch

        import hvd_cluster.torch as hvd

        hvd.init()
        first = hvd.allreduce_async(torch.ones(2_000_000), name="first", op=hvd.Sum)
        if hvd.rank() == culprit:
            hvd.synchronize(first)
            if ends == "raises":
                raise ValueError("the user's own")
            hvd.shutdown()
            return "ended"
        second = hvd.allreduce_async(torch.ones(2_000_000), name="second", op=hvd.Sum)
        assert hvd.synchronize(first)[0].item() == 4.0
        with pytest.raises(hvd.HorovodInternalError):
            hvd.synchronize(second)
        hvd.shutdown()
        return "told"

    if ends == "raises":
        with pytest.raises(WorkerFailedError, match="the user's own") as caught:
            hosts.run(fn, ranks=[2, 2], env=ENV)
        assert caught.value.rank == culprit
    else:
        expected = ["told"] * 4
        expected[culprit] = "ended"
        assert hosts.run(fn, ranks=[2, 2], env=ENV) == expected


@pytest.mark.slow
def test_a_fork_with_operations_in_flight_changes_nothing_and_adasum_adds_what_is_orthogonal(hosts: Hosts) -> None:
    def fn() -> tuple[int, list[float], list[float]]:
        import warnings

        import torch

        import hvd_cluster.torch as hvd

        hvd.init()
        sums = []
        for turn in range(3):
            tensor = torch.full((1_000_000,), float(turn))
            handle = hvd.allreduce_async(tensor, name="forked", op=hvd.Sum)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of forks with threads
                pid = os.fork()
            if pid == 0:
                os._exit(int(hvd.is_initialized()))
            sums.append(hvd.synchronize(handle)[-1].item())
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        own = torch.zeros(4)
        own[hvd.rank()] = 1.0 + hvd.rank()
        mixed = hvd.allreduce(own, op=hvd.Adasum, name="adasum").tolist()
        rank = hvd.rank()
        hvd.shutdown()
        return rank, sums, mixed

    expected = [(rank, [0.0, 4.0, 8.0], [1.0, 2.0, 3.0, 4.0]) for rank in range(4)]
    assert hosts.run(fn, ranks=[2, 2], env=ENV) == expected


@pytest.mark.parametrize(
    "victim",
    [pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.slow), 2],
    ids=["root", "no leader", "leader"],
)
def test_kill_9_in_mid_operation_is_an_error_on_every_survivor(hosts: Hosts, victim: int) -> None:
    def survive() -> None:
        import threading

        import torch
        from footprint import footprint, left_over

        import hvd_cluster.torch as hvd

        tensor = torch.ones(2_000_000)
        for _ in range(2):
            before = footprint()
            hvd.init()
            hvd.allreduce_(tensor, name="warm")
            hvd.shutdown()
        hvd.init()
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
        assert left_over(before) == {}

    start_s = time.monotonic()
    with pytest.raises(WorkerFailedError) as caught:
        hosts.run(survive, ranks=[2, 2], env=ENV)
    assert caught.value.rank == victim
    assert caught.value.exit_code == -signal.SIGKILL
    assert time.monotonic() - start_s < 30
