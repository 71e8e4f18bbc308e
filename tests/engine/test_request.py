"""The handle of a request: what its waiter gets, and when a GPU's results may be read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hvd_cluster.engine.buffers import BufferPool
from hvd_cluster.engine.execution import Execution
from hvd_cluster.engine.request import Handle, Request, describe, neutral_for, recorded_event
from hvd_cluster.engine.scaling import copy_scaled
from hvd_cluster.engine.signature import Kind, ReduceOp, Signature
from hvd_cluster.engine.timeline import Recorder
from hvd_cluster.engine.transports.alone import AloneTransport
from hvd_cluster.engine.transports.transport import FinishedWork, Work


class FakeStream:
    def __init__(self) -> None:
        self.waited_for: list[Any] = []

    def wait_event(self, event: Any) -> None:
        self.waited_for.append(event)


class FakeTensor:
    """A tensor on a GPU, as far as a handle can see."""

    is_cuda = True

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.used_by: list[FakeStream] = []

    def record_stream(self, stream: FakeStream) -> None:
        self.used_by.append(stream)


@pytest.mark.parametrize("value", [None, "a tensor made of them"])
def test_the_stream_that_waits_reads_results_that_the_value_does_not_show(
    monkeypatch: pytest.MonkeyPatch, value: Any
) -> None:
    streams = {torch.device("cuda", 0): FakeStream(), torch.device("cuda", 1): FakeStream()}
    monkeypatch.setattr(torch.cuda, "current_stream", streams.__getitem__)
    written, event = [FakeTensor("cuda:1"), FakeTensor("cuda:1")], object()
    handle = Handle()
    handle.succeed(value, written, event)  # type: ignore[arg-type]
    assert handle.wait() is value
    assert streams[torch.device("cuda", 1)].waited_for == [event]
    assert streams[torch.device("cuda", 0)].waited_for == []
    assert [tensor.used_by for tensor in written] == [[streams[torch.device("cuda", 1)]]] * 2


def request_for(tensor: torch.Tensor) -> Request:
    """An allreduce in place whose handle gives nothing, as an optimizer makes them."""
    return Request(
        "gradient",
        0,
        Signature(Kind.ALLREDUCE, (describe(tensor),)),
        [tensor],
        [tensor],
        lambda _: None,
        Handle(),
        ready_event=recorded_event([tensor]),
    )


class LateTransport(AloneTransport):
    """Doubles what it reduces, long after it was asked."""

    def allreduce(self, buffer: torch.Tensor, op: ReduceOp) -> Work:
        torch.cuda._sleep(200_000_000)  # cycles: a tenth of a second
        buffer.mul_(2)
        return FinishedWork()


@pytest.mark.gpu
def test_a_gradient_is_reduced_when_the_step_reads_it() -> None:
    device = torch.device("cuda", 0)
    gradient = torch.ones(1 << 20, device=device)
    request = request_for(gradient)
    transport = LateTransport(device, 0)
    execution = Execution([request], transport, BufferPool(), Recorder(0, "here"), release=lambda: None)
    execution.advance(lambda *_: None)
    request.handle.wait()
    assert gradient.sum().item() == 2 << 20


@pytest.mark.gpu
def test_the_zeros_of_a_joined_rank_are_written_before_they_are_sent() -> None:
    device = torch.device("cuda", 0)
    for _ in range(8):  # memory that holds something else, for the allocator to give out again
        torch.full((1 << 20,), 7.0, device=device)
    torch.cuda._sleep(200_000_000)
    signature = Signature(Kind.ALLREDUCE, (describe(torch.empty(1 << 20, device=device)),))
    request = neutral_for((0, "gradient"), signature, 0)
    transport = LateTransport(device, 0)
    transport.allreduce = lambda buffer, op: FinishedWork()  # type: ignore[method-assign]
    Execution([request], transport, BufferPool(), Recorder(0, "here"), release=lambda: None).advance(lambda *_: None)
    request.handle.wait()
    assert request.outputs[0].abs().sum().item() == 0.0
    assert request.ready_event is not None


def test_what_a_joined_rank_sends_stays_neutral_when_it_is_scaled() -> None:
    floats = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
    for dtype in [*floats, torch.uint8, torch.int8, torch.int32, torch.int64]:
        own = torch.tensor([1, 4, 100]).to(dtype)
        for op, combine in ((ReduceOp.MIN, torch.minimum), (ReduceOp.MAX, torch.maximum), (ReduceOp.SUM, torch.add)):
            for prescale in (1.0, 0.25, 1.25) if dtype == torch.uint8 else (1.0, 0.25, 1.25, 2.0, -0.25, -1.0):
                signature = Signature(Kind.ALLREDUCE, (describe(own),), op, prescale=prescale)
                (sent,) = neutral_for((0, "x"), signature, -1).inputs
                copy_scaled(sent, sent, prescale)
                scaled = torch.empty_like(own)
                copy_scaled(scaled, own, prescale)
                assert combine(scaled, sent).equal(scaled), (dtype, op, prescale)


def test_a_product_with_a_joined_rank_is_that_of_the_others() -> None:
    for dtype, prescale in ((torch.float32, 4.0), (torch.int32, 0.5), (torch.int32, 1.0), (torch.bool, 1.0)):
        signature = Signature(
            Kind.ALLREDUCE, (describe(torch.empty(2, dtype=dtype)),), ReduceOp.PRODUCT, prescale=prescale
        )
        (sent,) = neutral_for((0, "x"), signature, -1).inputs
        copy_scaled(sent, sent, prescale)
        assert sent.tolist() == [1, 1]
