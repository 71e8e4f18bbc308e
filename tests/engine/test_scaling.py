"""The arithmetic of reductions on every transport, against Python's integers and float64. Ranks are threads here."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from math import prod, trunc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_cluster.engine.buffers import BufferPool
from hvd_cluster.engine.collectives.allreduce import allreduce
from hvd_cluster.engine.collectives.reducescatter import reducescatter
from hvd_cluster.engine.fusion import even_sizes
from hvd_cluster.engine.request import Handle, Request, describe
from hvd_cluster.engine.shared_memory.arena import Arena
from hvd_cluster.engine.signature import Kind, ReduceOp, Signature
from hvd_cluster.engine.timeline import Recorder
from hvd_cluster.engine.transports import hierarchical, shm_layout
from hvd_cluster.engine.transports.alone import AloneTransport
from hvd_cluster.engine.transports.exchange import HostExchange
from hvd_cluster.engine.transports.gloo import GlooTransport
from hvd_cluster.engine.transports.hierarchical import HierarchicalTransport
from hvd_cluster.engine.transports.shm import ShmTransport
from hvd_cluster.engine.transports.shm_layout import segment_bytes
from hvd_cluster.engine.transports.transport import Transport

AVERAGE, SUM, MIN, MAX, PRODUCT = (
    ReduceOp.AVERAGE,
    ReduceOp.SUM,
    ReduceOp.MIN,
    ReduceOp.MAX,
    ReduceOp.PRODUCT,
)
HALVES = [torch.float16, torch.bfloat16]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
REGION_BYTES = 1 << 22


class ThreadGloo(GlooTransport):
    """A Gloo group among threads."""

    def __init__(self, store: dist.Store, index: int, ranks: tuple[int, ...]) -> None:
        self.device = torch.device("cpu")
        self.index, self.ranks = index, ranks
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=20)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        self._group: Any = dist.ProcessGroupGloo(store, index, len(ranks), options)
        self._sockets = set()


class World:
    """Ranks that are threads, and what connects them."""

    def __init__(self, transports: list[Transport], arenas: Sequence[Arena] = ()) -> None:
        self.transports = transports
        self.arenas = arenas
        self.num_ranks = len(transports)
        self.name = transports[0].name
        self._pool = ThreadPoolExecutor(self.num_ranks)
        everyone = threading.Barrier(self.num_ranks)
        self.map(lambda _: everyone.wait())  # all threads are there before the first test

    def close(self) -> None:
        for transport in self.transports:
            transport.close()
        self._pool.shutdown()

    def map(self, fn: Callable[[int], Any]) -> list[Any]:
        """``fn(rank)`` of each rank."""
        return list(self._pool.map(fn, range(self.num_ranks)))

    def reduce(
        self,
        op: ReduceOp,
        by_rank: list[list[torch.Tensor]],
        prescale: float = 1.0,
        postscale: float = 1.0,
        *,
        wire: str = "",
        in_place: bool = False,
        kind: Kind = Kind.ALLREDUCE,
    ) -> list[list[torch.Tensor]]:
        """The results of each rank; the tensors of a rank are one request."""
        collective = {Kind.ALLREDUCE: allreduce, Kind.REDUCESCATTER: reducescatter}[kind]

        def fn(rank: int) -> list[torch.Tensor]:
            tensors = by_rank[rank]
            metas = tuple(describe(tensor) for tensor in tensors)
            signature = Signature(kind, metas, op, prescale=prescale, postscale=postscale, wire=wire)
            outputs = tensors if in_place else []
            request = Request("r", 0, signature, tensors, outputs, lambda results: results, Handle())
            steps = collective([request], self.transports[rank], BufferPool(), Recorder(rank, "here"))
            try:
                while True:
                    for work in next(steps).works:
                        work.result()
            except StopIteration as stop:
                return stop.value[0]

        return self.map(fn)


def _alone() -> World:
    return World([AloneTransport(torch.device("cpu"), 0)])


def _shared(num_ranks: int) -> World:
    descriptor = os.memfd_create("scaling", os.MFD_CLOEXEC)
    start = -(-segment_bytes(num_ranks) // mmap.PAGESIZE) * mmap.PAGESIZE
    os.ftruncate(descriptor, start + num_ranks * REGION_BYTES)
    memory = mmap.mmap(descriptor, start + num_ranks * REGION_BYTES)
    arenas = [Arena(memory, os.dup(descriptor), start, REGION_BYTES, index) for index in range(num_ranks)]
    os.close(descriptor)
    ranks = tuple(range(num_ranks))
    transports = [
        ShmTransport(memory, index=index, ranks=ranks, check=lambda *_: None, timeout_s=20, arena=arenas[index])
        for index in ranks
    ]
    return World(list(transports), arenas)


def _gloo(num_ranks: int) -> World:
    store, ranks = dist.HashStore(), tuple(range(num_ranks))
    with ThreadPoolExecutor(num_ranks) as pool:
        return World(list(pool.map(lambda index: ThreadGloo(store, index, ranks), ranks)))


def _hosts(*sizes: int) -> World:
    """Hosts of so many ranks each."""
    ranks = tuple(range(sum(sizes)))
    stores = dist.HashStore(), dist.HashStore()
    hosts = [ranks[sum(sizes[:host]) :][:size] for host, size in enumerate(sizes)]
    leaders = tuple(host[0] for host in hosts)
    piece_bytes = mmap.PAGESIZE
    memories = [mmap.mmap(-1, HostExchange.num_bytes(size, piece_bytes)) if size > 1 else None for size in sizes]

    def build(rank: int) -> Transport:
        (number,) = [number for number, host in enumerate(hosts) if rank in host]
        host = hosts[number]
        within = HostExchange(
            memories[number],
            index=host.index(rank),
            ranks=host,
            piece_bytes=piece_bytes,
            check=lambda *_: None,
            timeout_s=20,
        )
        flat = ThreadGloo(stores[0], rank, ranks)
        between = ThreadGloo(stores[1], leaders.index(rank), leaders) if rank in leaders else None
        return HierarchicalTransport(flat, within, between, lambda: None)

    with ThreadPoolExecutor(len(ranks)) as pool:
        return World(list(pool.map(build, ranks)))


WORLDS = {
    "alone": _alone,
    "shm 2": partial(_shared, 2),
    "shm 3": partial(_shared, 3),
    "shm 4": partial(_shared, 4),
    "gloo 2": partial(_gloo, 2),
    "gloo 3": partial(_gloo, 3),
    "hosts 2+2": partial(_hosts, 2, 2),
    "hosts 2+1": partial(_hosts, 2, 1),
}


@pytest.fixture(scope="module", params=WORLDS)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setattr(shm_layout, "_SLOT_BYTES", mmap.PAGESIZE)  # few elements pass in many chunks
        patch.setattr(hierarchical, "_MIN_BYTES", 0)
        built = WORLDS[request.param]()
        stack.callback(built.close)
        yield built


@pytest.fixture(scope="module", params=[2, 3, 4])
def sharing(request: pytest.FixtureRequest) -> Iterator[World]:
    world = _shared(request.param)
    yield world
    world.close()
    for arena in world.arenas:
        arena.close()


# ---- against a reference --------------------------------------------------------------------------------------------

SCALES = [
    (1.0, 1.0),
    (0.25, 4.0),
    (4.0, 0.25),
    (0.5, 1.0),
    (1.0, 0.5),
    (3.0, 1.0),
    (1.0, 3.0),
    (-2.0, 0.25),
    (0.0, 1.0),
]


def wanted_real(op: ReduceOp, values: torch.Tensor, prescale: float, postscale: float) -> torch.Tensor:
    """The definition, in float64; ``values`` are of shape (ranks, elements)."""
    scaled = values.double() * prescale
    whole = {SUM: scaled.sum, AVERAGE: scaled.mean, MIN: scaled.amin, MAX: scaled.amax, PRODUCT: scaled.prod}[op]
    return whole(0) * postscale


def wanted_integer(op: ReduceOp, values: list[int], prescale: float, postscale: float, dtype: torch.dtype) -> int:
    """The definition, in Python's integers: a factor truncates, a mean truncates, and the result wraps around."""
    scaled = values if prescale == 1.0 else [trunc(value * prescale) for value in values]
    whole = {SUM: sum, AVERAGE: sum, MIN: min, MAX: max, PRODUCT: prod}[op](scaled)
    divisor = len(values) if op == AVERAGE else 1
    if postscale != 1.0:
        whole = trunc(whole * postscale / divisor)
    elif divisor > 1:
        whole = whole // divisor + (whole < 0 and whole % divisor > 0)
    info = torch.iinfo(dtype)
    return (whole - info.min) % (1 << info.bits) + info.min


@st.composite
def reductions(draw: st.DrawFn, dtypes: Sequence[torch.dtype]) -> tuple[torch.dtype, ReduceOp, float, float, int]:
    dtype, op = draw(st.sampled_from(dtypes)), draw(st.sampled_from([AVERAGE, SUM, MIN, MAX, PRODUCT]))
    return (dtype, op, *draw(st.sampled_from(SCALES)), draw(st.integers(0, 1 << 30)))


def in_two(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [part.clone() for part in tensor.split([1, len(tensor) - 1])]


@pytest.mark.long
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(reduction=reductions([*HALVES, torch.float32, torch.float64]))
def test_real_numbers_are_reduced_as_in_float64_up_to_their_own_rounding(world: World, reduction: Any) -> None:
    dtype, op, prescale, postscale, seed = reduction
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(world.num_ranks, 2500, generator=generator, dtype=torch.float64)
    # As large as the type allows where a sum is all right, so that an average of any numbers must not overflow.
    largest = 65504.0 if dtype == torch.float16 else 1e30
    values = noise.sign() * (1 + noise.abs() % 1) if op == PRODUCT else (noise * largest / 3).clamp(-largest, largest)
    values = values.to(dtype)
    scale = prescale * postscale / (world.num_ranks if op == AVERAGE else 1)
    wanted = wanted_real(op, values, prescale, postscale)
    total = (values.double() * scale).abs().sum(0) if op in (SUM, AVERAGE) else wanted.abs()
    results = world.reduce(op, [in_two(row) for row in values], prescale, postscale)
    result = torch.cat(results[0])
    for other in results[1:]:
        torch.testing.assert_close(torch.cat(other), result, rtol=0.0, atol=0.0, equal_nan=True)
    fits = total < torch.finfo(dtype).max * 0.99
    # The ranks of one host add halves in float32; between hosts each addition rounds.
    roundings = 1 if world.name in ("SHM", "ALONE") and op != PRODUCT else 2 * world.num_ranks + 1
    limit = torch.finfo(dtype).eps * (total if roundings > 1 else wanted.abs()) * roundings / 2 * 1.01
    limit += torch.finfo(torch.float32 if dtype in HALVES else dtype).eps * total * (world.num_ranks + 1)
    limit += torch.finfo(dtype).smallest_normal
    assert ((result.double() - wanted).abs() <= limit)[fits].all()


@pytest.mark.long
@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(reduction=reductions(INTEGERS))
def test_integers_are_reduced_as_pythons_are(world: World, reduction: Any) -> None:
    dtype, op, prescale, postscale, seed = reduction
    info = torch.iinfo(dtype)
    generator = torch.Generator().manual_seed(seed)
    is_real = dtype == torch.int64 and (prescale, postscale) != (1.0, 1.0)  # computed in float64: 53 bits
    low, high = (-(1 << 40), 1 << 40) if is_real else (info.min, info.max)
    if op == PRODUCT and (prescale, postscale) != (1.0, 1.0):
        low, high = max(low, -3), 3
    values = torch.randint(low, high, (world.num_ranks, 600), generator=generator, dtype=dtype)
    values[:, 0], values[:, 1] = low, high
    columns = values.T.tolist()
    wanted = [wanted_integer(op, column, prescale, postscale, dtype) for column in columns]
    results = world.reduce(op, [in_two(row) for row in values], prescale, postscale)
    for result in results:
        assert torch.cat(result).tolist() == wanted


@pytest.mark.long
@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(reduction=reductions([*HALVES, torch.float32, *INTEGERS]).filter(lambda drawn: drawn[1] in (SUM, AVERAGE)))
def test_a_reducescatter_gives_the_rows_of_the_same_numbers(world: World, reduction: Any) -> None:
    dtype, op, prescale, postscale, seed = reduction
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        largest = 65504.0 if dtype == torch.float16 else 1e30
        values = ((torch.rand(world.num_ranks, 50, generator=generator) * 2 - 1) * largest).to(dtype)
        total = values.double().abs().sum(0) * abs(prescale * postscale) / (world.num_ranks if op == AVERAGE else 1)
        wanted = wanted_real(op, values, prescale, postscale)
        wanted[total >= torch.finfo(dtype).max] = float("nan")
    else:
        info = torch.iinfo(dtype)
        is_real = dtype == torch.int64 and (prescale, postscale) != (1.0, 1.0)
        low, high = (-(1 << 40), 1 << 40) if is_real else (info.min, info.max)
        values = torch.randint(low, high, (world.num_ranks, 50), generator=generator, dtype=dtype)
        wanted = [wanted_integer(op, column, prescale, postscale, dtype) for column in values.T.tolist()]
    results = world.reduce(op, [[row] for row in values], prescale, postscale, kind=Kind.REDUCESCATTER)
    result = torch.cat([result[0] for result in results])
    assert [len(part[0]) for part in results] == even_sizes(50, world.num_ranks)
    if dtype.is_floating_point:
        rounding = torch.finfo(dtype).eps / 2 * 1.01 * wanted.abs() + torch.finfo(torch.float32).eps * 5 * total
        assert ((result.double() - wanted).abs() <= rounding + torch.finfo(dtype).smallest_normal)[
            ~wanted.isnan()
        ].all()
    else:
        assert result.tolist() == wanted


# ---- numbers that are easily lost -----------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.25, 4.0), (4.0, 0.25), (0.1, 10.0), (1e-3, 1e3)], ids=str)
@pytest.mark.parametrize("kind", [Kind.ALLREDUCE, Kind.REDUCESCATTER], ids=lambda kind: kind.value)
def test_the_average_of_large_halves_does_not_overflow(world: World, kind: Kind, scales: tuple[float, float]) -> None:
    inputs = [[torch.full((8,), value).half() for value in (50_000.0, 65_504.0)] for _ in range(world.num_ranks)]
    for first, second in world.reduce(AVERAGE, inputs, *scales, kind=kind):
        torch.testing.assert_close(first, torch.full_like(first, 50_000.0), rtol=2e-3, atol=0.0)
        torch.testing.assert_close(second, torch.full_like(second, 65_472.0), rtol=2e-3, atol=0.0)


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.25, 4.0), (0.125, 8.0)], ids=str)
def test_float16_on_the_wire_carries_the_average_of_what_fits_after_the_prescale_factor(
    world: World, scales: tuple[float, float]
) -> None:
    large = 60_000.0 / scales[0]
    inputs = [[torch.full((5,), large), torch.full((3000,), large)] for _ in range(world.num_ranks)]
    for result in world.reduce(AVERAGE, inputs, *scales, wire="float16"):
        for tensor in result:
            torch.testing.assert_close(tensor, torch.full_like(tensor, large), rtol=2e-3, atol=0.0)


def test_a_sum_that_is_scaled_down_afterwards_does_not_overflow(world: World) -> None:
    scale = 1.0 / world.num_ranks
    halves = [[torch.full((6,), 60_000.0).half()] for _ in range(world.num_ranks)]
    singles = [[torch.full((6,), 60_000.0)] for _ in range(world.num_ranks)]
    integers = [[torch.full((6,), 120, dtype=torch.int8)] for _ in range(world.num_ranks)]
    for (half,), (single,), (integer,) in zip(
        world.reduce(SUM, halves, 1.0, scale),
        world.reduce(SUM, singles, 1.0, scale, wire="float16"),
        world.reduce(SUM, integers, 1.0, scale),
        strict=True,
    ):
        torch.testing.assert_close(half, torch.full_like(half, 60_000.0), rtol=2e-3, atol=0.0)
        torch.testing.assert_close(single, torch.full_like(single, 60_000.0), rtol=2e-3, atol=0.0)
        assert set(integer.tolist()) <= {119, 120}  # 120 * 3 * (1 / 3) may be a little less


def test_the_mean_of_equal_integers_is_that_integer(world: World) -> None:
    for dtype in INTEGERS:
        info = torch.iinfo(dtype)
        values = torch.tensor([info.min, info.max, info.max - 1, info.min + 1, 0, 1, info.max // 2 + 1], dtype=dtype)
        for kind in (Kind.ALLREDUCE, Kind.REDUCESCATTER):
            results = world.reduce(AVERAGE, [[values.clone()] for _ in range(world.num_ranks)], kind=kind)
            parts = [part[0] for part in results] if kind == Kind.REDUCESCATTER else [results[-1][0]]
            assert torch.cat(parts).tolist() == values.tolist()


def test_a_large_bfloat16_keeps_its_mean(world: World) -> None:
    values = torch.tensor([3e38, -3e38, 1e-40, 1.0] * world.num_ranks).bfloat16()
    inputs = [[values.clone()] for _ in range(world.num_ranks)]
    for kind in (Kind.ALLREDUCE, Kind.REDUCESCATTER):
        for op, postscale in ((AVERAGE, 1.0), (SUM, 1 / world.num_ranks)):
            results = world.reduce(op, inputs, postscale=postscale, kind=kind)
            means = torch.cat([part[0] for part in results])[: len(values)].float()
            assert torch.allclose(means, values.float(), rtol=1e-2, atol=1e-40), (kind, op)


def test_a_scaled_sum_of_int64_wraps_only_if_it_does_not_fit(world: World) -> None:
    values = torch.tensor([2**63 - 2, 2**63 - 1, -(2**63), 7] * world.num_ranks)
    for kind in (Kind.ALLREDUCE, Kind.REDUCESCATTER):
        inputs = [[values.clone()] for _ in range(world.num_ranks)]
        results = world.reduce(SUM, inputs, 1.0, 1 / world.num_ranks, kind=kind)
        found = torch.cat([part[0] for part in results])[: len(values)]
        assert torch.equal(found.double(), values.double())
        assert torch.equal(found > 0, values > 0)


def test_a_bfloat16_sum_within_a_host_rounds_once() -> None:
    world = _shared(4)
    # 256 + 1 is not a bfloat16; 256 + 1 + 1 + 1 rounds to 260.
    inputs = [[torch.full((4,), 256.0 if rank == 0 else 1.0).bfloat16()] for rank in range(4)]
    try:
        assert [result[0].tolist() for result in world.reduce(SUM, inputs)] == [[260.0] * 4] * 4
    finally:
        world.close()
        for arena in world.arenas:
            arena.close()


# ---- where a tensor lives -------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("op", [SUM, AVERAGE, MAX], ids=lambda op: op.name)
def test_shared_tensors_get_the_bits_of_ordinary_ones(sharing: World, dtype: torch.dtype, op: ReduceOp) -> None:
    generator = torch.Generator().manual_seed(1)
    values = (torch.randn(sharing.num_ranks, 100_003, generator=generator) * 30_000).clamp(-60_000, 60_000)
    values[:, :4] = 3e38 if dtype in (torch.float32, torch.bfloat16) else 50_000
    ordinary = [row.to(dtype) for row in values]
    shared = [arena.empty((100_003,), dtype).copy_(row) for arena, row in zip(sharing.arenas, ordinary, strict=True)]
    sharing.reduce(op, [[tensor] for tensor in shared], in_place=True)
    sharing.reduce(op, [[tensor] for tensor in ordinary], in_place=True)
    for tensor, other in zip(shared, ordinary, strict=True):
        assert torch.equal(tensor.cpu(), other)
        assert torch.equal(other, ordinary[0])


@pytest.mark.long
@pytest.mark.parametrize("length", [10, 100_000, 900_000])
@pytest.mark.parametrize("place", ["shared", "private", "mixed"])
def test_a_tensor_that_is_given_twice_is_reduced_once(sharing: World, place: str, length: int) -> None:
    tensors = []
    for rank, arena in enumerate(sharing.arenas):
        is_shared = place == "shared" or (place == "mixed" and rank == 0)
        tensor = arena.empty((length,), torch.float32) if is_shared else torch.empty(length)
        tensors.append(tensor.fill_(1.0))
    sharing.reduce(SUM, [[tensor, tensor] for tensor in tensors], in_place=True)
    for tensor in tensors:
        assert torch.equal(tensor, torch.full((length,), float(sharing.num_ranks)))


@pytest.mark.parametrize("place", ["shared", "private"])
def test_views_that_overlap_are_reduced_once(sharing: World, place: str) -> None:
    length = 600_000
    tensors = [
        (arena.empty((length,), torch.float32) if place == "shared" else torch.empty(length)).fill_(1.0)
        for arena in sharing.arenas
    ]
    views = [[t[: length // 2 + 99], t[length // 3 :], t[7:9]] for t in tensors]
    sharing.reduce(SUM, views, in_place=True)
    for tensor in tensors:
        assert torch.equal(tensor, torch.full((length,), float(sharing.num_ranks)))


def test_views_that_overlap_on_one_rank_only_do_not_disturb_the_others(sharing: World) -> None:
    length = 100_000
    wholes = [arena.empty((2 * length,), torch.float32).fill_(1.0) for arena in sharing.arenas]
    views = [[t[:length], t[length:]] for t in wholes]
    views[0] = [wholes[0][:length], wholes[0][:length]]
    sharing.reduce(SUM, views, in_place=True)
    for rank, tensor in enumerate(wholes):
        reduced = tensor[:length] if rank == 0 else tensor
        assert torch.equal(reduced, torch.full_like(reduced, float(sharing.num_ranks)))


def test_overlapping_views_are_reduced_once_between_hosts(world: World) -> None:
    length = 20_000
    tensors = [torch.ones(length) for _ in range(world.num_ranks)]
    world.reduce(SUM, [[t, t, t[5 : length - 5]] for t in tensors], in_place=True)
    for tensor in tensors:
        assert torch.equal(tensor, torch.full((length,), float(world.num_ranks)))
