"""The shared-memory transport: chunks and turns, between ranks that are threads here; processes are in tests/torch."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from hvd_cluster.engine.signature import ReduceOp
from hvd_cluster.engine.transports import shm_layout
from hvd_cluster.engine.transports.shm import ShmTransport
from hvd_cluster.engine.transports.shm_layout import segment_bytes


def on_ranks(num_ranks: int, fn: Callable[[ShmTransport], Any], *, spins: bool = False) -> list[Any]:
    """``fn(transport)`` on each rank, one thread each."""
    segment = mmap.mmap(-1, segment_bytes(num_ranks))
    transports = [
        ShmTransport(segment, index=i, ranks=tuple(range(num_ranks)), check=lambda *_: None, timeout_s=20, spins=spins)
        for i in range(num_ranks)
    ]
    with ThreadPoolExecutor(num_ranks) as pool:
        results = list(pool.map(fn, transports))
    for transport in transports:
        transport.close()
    return results


@pytest.fixture
def small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots of one page, so that few elements need many chunks."""
    monkeypatch.setattr(shm_layout, "_SLOT_BYTES", 4096)


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 7])
@pytest.mark.parametrize("length", [1, 1024, 1025, 10_000])
@pytest.mark.parametrize("spins", [False, True], ids=["sleeps", "spins"])
@pytest.mark.usefixtures("small_slots")
def test_a_sum_over_many_chunks_is_exact_and_equal_on_all_ranks(num_ranks: int, length: int, spins: bool) -> None:
    inputs = [torch.randn(length, generator=torch.Generator().manual_seed(i)) for i in range(num_ranks)]

    def fn(transport: ShmTransport) -> torch.Tensor:
        for _ in range(3):
            buffer = inputs[transport.index].clone()
            transport.allreduce(buffer, ReduceOp.SUM)
        return buffer

    results = on_ranks(num_ranks, fn, spins=spins)
    torch.testing.assert_close(results[0], torch.stack(inputs).sum(dim=0), rtol=1e-5, atol=1e-5)
    for result in results[1:]:
        assert torch.equal(result, results[0])


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.usefixtures("small_slots")
def test_bytes_are_gathered_broadcast_and_exchanged_over_many_chunks(num_ranks: int) -> None:
    length = 9_001

    def fn(transport: ShmTransport) -> bool:
        index = transport.index
        mine = torch.full((length,), index + 1, dtype=torch.uint8)
        gathered = torch.empty(num_ranks * length, dtype=torch.uint8)
        transport.allgather(gathered, mine)
        ok = all((gathered[r * length : (r + 1) * length] == r + 1).all() for r in range(num_ranks))
        for root in range(num_ranks):
            buffer = mine.clone()
            transport.broadcast(buffer, root)
            ok &= bool((buffer == root + 1).all())
        # Rank s sends 3000 * s + 100 * r + 1 bytes of the value 10 s + r to rank r.
        sizes = [[3000 * s + 100 * r + 1 for r in range(num_ranks)] for s in range(num_ranks)]
        sent = torch.cat([torch.full((n,), 10 * index + r, dtype=torch.uint8) for r, n in enumerate(sizes[index])])
        incoming = [sizes[s][index] for s in range(num_ranks)]
        received = torch.empty(sum(incoming), dtype=torch.uint8)
        for _ in range(2):
            transport.alltoall(received, sent, incoming, sizes[index])
        parts = received.split(incoming)
        return ok and all((part == 10 * s + index).all() for s, part in enumerate(parts))

    assert all(on_ranks(num_ranks, fn))


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("spins", [False, True], ids=["sleeps", "spins"])
@pytest.mark.usefixtures("small_slots")
def test_the_result_of_reduce_scatter_may_take_the_place_of_the_operand(num_ranks: int, spins: bool) -> None:
    length = 3_001

    def fn(transport: ShmTransport) -> bool:
        for op, divisor, expected in (
            (ReduceOp.SUM, 1, sum(10**index for index in range(num_ranks))),
            (ReduceOp.MAX, 1, 10 ** (num_ranks - 1)),
            (ReduceOp.SUM, num_ranks, sum(10**index for index in range(num_ranks)) / num_ranks),
        ):
            buffer = torch.full((num_ranks * length,), float(10**transport.index))
            own = buffer.view(num_ranks, length)[transport.index]
            transport.reduce_scatter(own, buffer, op, divisor)
            torch.testing.assert_close(own, torch.full((length,), float(expected)))
        return True

    assert all(on_ranks(num_ranks, fn, spins=spins))


@pytest.mark.parametrize(
    ("ranks", "words"),
    [((0, 4), "rank 4 of this host did not"), ((0, 2, 5), "ranks 2, 5 of this host did not")],
)
def test_a_rank_that_waits_too_long_says_for_whom(ranks: tuple[int, ...], words: str) -> None:
    segment = mmap.mmap(-1, segment_bytes(len(ranks)))
    alone = ShmTransport(segment, index=0, ranks=ranks, check=lambda *_: None, timeout_s=0.1)
    with pytest.raises(RuntimeError, match=rf"{words} come to a collective within 0\.1 s"):
        alone.allreduce(torch.ones(1), ReduceOp.SUM)
    alone.close()


def test_a_broken_world_ends_the_wait() -> None:
    def broken(_: object = None) -> None:
        raise RuntimeError("rank 1 is gone")

    segment = mmap.mmap(-1, segment_bytes(2))
    alone = ShmTransport(segment, index=0, ranks=(0, 1), check=broken, timeout_s=60)
    with pytest.raises(RuntimeError, match="rank 1 is gone"):
        alone.allreduce(torch.ones(1), ReduceOp.SUM)
    alone.close()


@pytest.mark.parametrize("num_ranks", [2, 8, 64, 500])
def test_the_segment_of_a_host_is_bounded(num_ranks: int) -> None:
    assert segment_bytes(num_ranks) <= (256 << 20) + num_ranks * num_ranks * 16 + num_ranks * 9 * 64 + 4096


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64])
@pytest.mark.usefixtures("small_slots")
def test_a_whole_reduction_scales_as_the_definition_says(num_ranks: int, dtype: torch.dtype) -> None:
    lengths = [1, 0, 700, 5_000, 3]
    inputs = [[(torch.arange(n) % 50 + 3 * rank - 20).to(dtype) for n in lengths] for rank in range(num_ranks)]

    def fn(transport: ShmTransport) -> list[torch.Tensor]:
        mine = [tensor.clone() for tensor in inputs[transport.index]]
        outputs = [mine[0], *(torch.empty_like(tensor) for tensor in mine[1:])]  # the first one in place
        scales = {"prescale": 2.0, "postscale": 3.0, "divisor": num_ranks}
        assert transport.reduce_directly(mine, outputs, ReduceOp.SUM, wire=mine[0].dtype, **scales)
        return outputs

    results = on_ranks(num_ranks, fn)
    for i in range(len(lengths)):
        wanted = sum(inputs[rank][i].double() * 2 for rank in range(num_ranks)) * 3 / num_ranks
        wanted = wanted.trunc() if dtype == torch.int64 else wanted
        torch.testing.assert_close(results[0][i].double(), wanted, rtol=2e-3, atol=1e-3)
        assert all(torch.equal(result[i], results[0][i]) for result in results)
