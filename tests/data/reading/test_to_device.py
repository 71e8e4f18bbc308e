"""Batches on their way to a device; what only a GPU can show is in tests/gpu/test_estimators.py."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hvd_cluster.data.reading.read_ahead import ReadAheadClosedError
from hvd_cluster.data.reading.to_device import ToDevice

CPU = torch.device("cpu")


def test_on_the_cpu_batches_are_taken_one_by_one_and_stay_as_they_are() -> None:
    batches = [{"x": torch.ones(2)} for _ in range(3)]
    left = iter(batches)
    for number, batch in enumerate(ToDevice(CPU)(left)):
        assert batch is batches[number]
    assert list(left) == []


class Stream:
    """A CUDA stream that does nothing: the copies are those of the CPU."""

    def __init__(self, device: object) -> None:
        self.device = device

    def record_event(self) -> str:
        return "event"

    def wait_event(self, event: str) -> None:
        assert event == "event"


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The thread that copies batches ahead, without a GPU."""
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream(CPU))
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor.clone())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    with ToDevice(CPU) as to_device:
        yield lambda batches: to_device._copied_ahead(iter(batches))


class Left(dict[str, Any]):
    """A batch that knows more than its columns."""

    num_left_out = 0


def test_batches_that_are_copied_ahead_keep_their_order_and_their_type(ahead: Any) -> None:
    batches = [Left(x=torch.full((3,), float(number)), text="kept") for number in range(5)]
    batches[4].num_left_out = 7
    found = list(ahead(batches))
    assert [batch["x"].tolist() for batch in found] == [[float(number)] * 3 for number in range(5)]
    assert {type(batch) for batch in found} == {Left}
    assert [batch.num_left_out for batch in found] == [0, 0, 0, 0, 7]
    assert all(batch["x"] is not before["x"] for batch, before in zip(found, batches, strict=True))


def test_the_error_of_a_batch_comes_at_its_place(ahead: Any) -> None:
    def batches() -> Iterator[dict[str, Any]]:
        yield {"x": torch.ones(2)}
        yield {"x": torch.ones(2)}
        raise ValueError("a bad file")

    found = ahead(batches())
    assert len([next(found), next(found)]) == 2
    with pytest.raises(ValueError, match="a bad file"):
        next(found)


def test_an_iteration_that_is_given_up_ends_its_thread(ahead: Any) -> None:
    taken = 0

    def batches() -> Iterator[dict[str, Any]]:
        nonlocal taken
        while True:
            taken += 1
            yield {"x": torch.ones(2)}

    found = ahead(batches())
    next(found)
    found.close()
    assert taken <= 3


@pytest.mark.usefixtures("ahead")
def test_an_epoch_that_a_traceback_keeps_is_ended_with_what_copies() -> None:
    def batches() -> Iterator[dict[str, Any]]:
        while True:
            yield {"x": torch.ones(2)}

    with ToDevice(CPU) as to_device:
        kept = to_device._copied_ahead(batches())
        next(kept)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hvd-to-device")]
    with pytest.raises(ReadAheadClosedError):
        next(kept)
