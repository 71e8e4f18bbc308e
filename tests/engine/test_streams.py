"""Streams of several GPUs, and the order of the engine's work among them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fake_gpus import FakeEvent, FakeGpus, FakeStream, FakeTensor

from hvd_cluster.engine import execution, streams
from hvd_cluster.engine.buffers import BufferPool
from hvd_cluster.engine.collectives.stage import Stage
from hvd_cluster.engine.execution import Execution, execute_inline
from hvd_cluster.engine.request import Handle, Request, describe
from hvd_cluster.engine.signature import Kind, Signature
from hvd_cluster.engine.streams import OwnStreams, behind, on_streams
from hvd_cluster.engine.timeline import Recorder
from hvd_cluster.engine.transports.alone import AloneTransport


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> FakeGpus:
    """No GPU is selected, so GPU 0 is the current one, and there are no contexts."""
    fake = FakeGpus()
    fake.install(monkeypatch)
    monkeypatch.setattr(streams, "_joining", OwnStreams())
    monkeypatch.setattr(execution, "_side_streams", OwnStreams())
    return fake


def test_a_thread_uses_streams_of_other_gpus_and_makes_no_context_on_gpu_0(gpus: FakeGpus) -> None:
    first, second = FakeStream(2), FakeStream(1)
    with on_streams([first, second]):  # type: ignore[list-item]
        assert gpus.current == 2
        assert gpus.current_stream() is first
        assert gpus.current_stream(1) is second
    assert gpus.current == 0
    assert gpus.current_stream(2) is not first
    assert gpus.current_stream(1) is not second
    assert gpus.contexts == {1, 2}


def test_work_behind_the_current_stream_stays_on_it(gpus: FakeGpus) -> None:
    current: Any = gpus.current_stream(1)
    with behind([current, current]):
        assert gpus.current_stream(1) is current


def test_work_behind_several_streams_makes_none_of_them_wait(gpus: FakeGpus) -> None:
    side: Any = FakeStream(0)
    gpus.current_stream().work.add("one branch")
    side.work.add("another branch")
    with behind([side]):
        assert gpus.current_stream().work == {"one branch", "another branch"}
    assert gpus.current_stream().work == {"one branch"}
    assert side.work == {"another branch"}


def test_a_bucket_of_tensors_on_two_gpus_is_in_order_with_the_streams_of_both(
    gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[int, set[str]] = {}

    def collective(requests: list[Request], *_: Any) -> Iterator[Stage]:
        for gpu in (1, 0):
            stream = gpus.current_stream(gpu)
            found[gpu] = set(stream.work)
            stream.work.add(f"sum on {gpu}")
        yield Stage([], "REDUCE", time.monotonic())
        return [request.inputs for request in requests]

    monkeypatch.setitem(execution.COLLECTIVES, Kind.ALLREDUCE, collective)
    requests = []
    for gpu in (1, 0):
        tensor: Any = FakeTensor(f"cuda:{gpu}")
        ready: Any = FakeEvent()
        ready.work = frozenset({f"gradient on {gpu}"})
        signature = Signature(Kind.ALLREDUCE, (describe(tensor),))
        request = Request(f"x{gpu}", 0, signature, [tensor], [tensor], lambda _: None, Handle(), ready_event=ready)
        requests.append(request)
    own = [gpus.current_stream(gpu) for gpu in (0, 1)]
    transport = AloneTransport(torch.device("cuda", 0), 0)
    Execution(requests, transport, BufferPool(), Recorder(0, "here"), release=lambda: None).advance(lambda *_: None)

    assert found == {gpu: {"gradient on 0", "gradient on 1"} for gpu in (0, 1)}
    assert [gpus.current_stream(gpu) for gpu in (0, 1)] == own
    assert [stream.work for stream in own] == [set(), set()]
    for request in requests:
        request.handle.wait()
    assert all({"sum on 0", "sum on 1"} <= stream.work for stream in own)


class HereTransport(AloneTransport):
    """Ends its work in the calling thread, as shared memory does."""

    ends_in_caller = True


@pytest.mark.parametrize("is_on_gpu", [False, True])
def test_only_on_the_cpu_a_call_is_executed_on_the_streams_of_the_thread_that_finds_it(is_on_gpu: bool) -> None:
    tensor = torch.ones(2)
    ready: Any = FakeEvent() if is_on_gpu else None
    request = Request(
        "call",
        0,
        Signature(Kind.BROADCAST, (describe(tensor),), root=0),
        [tensor],
        [tensor],
        lambda _: None,
        Handle(),
        ready_event=ready,
        is_ordered=True,
    )
    transport = HereTransport(torch.device("cpu"), 0)
    is_done = execute_inline([request], transport, BufferPool(), Recorder(0, "here"), lambda: None)
    assert (is_done, request.handle.settled()) == (not is_on_gpu, not is_on_gpu)
