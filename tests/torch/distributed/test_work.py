"""On which stream, and on which GPU, the future of a call is completed; the GPUs are fakes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_gpus import FakeEvent, FakeGpus, FakeTensor

from hvd_cluster.engine.request import Handle
from hvd_cluster.engine.streams import OwnStreams
from hvd_cluster.torch.distributed import work as module
from hvd_cluster.torch.distributed.futures import _on_these_streams
from hvd_cluster.torch.distributed.work import HandleWork


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> FakeGpus:
    fake = FakeGpus()
    fake.install(monkeypatch)
    monkeypatch.setattr(module, "_streams", OwnStreams())
    return fake


def test_a_future_is_complete_behind_the_call_on_its_gpu_and_the_stream_of_the_program_does_not_wait(
    gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []

    class Future:
        def __init__(self, *_: Any) -> None:
            """The GPUs of torch's futures are real."""

        def set_result(self, results: Any) -> None:
            found.append((results, gpus.current, set(gpus.current_stream().work)))

    monkeypatch.setattr(module, "CallFuture", Future)
    tensor: Any = FakeTensor("cuda:1")
    done: Any = FakeEvent()
    done.work = frozenset({"call"})
    handle = Handle()
    handle.succeed(None, [tensor], done)
    program = gpus.current_stream(1)
    HandleWork(handle, [tensor]).get_future()

    assert found == [([tensor], 1, {"call"})]
    assert gpus.current_stream(1) is program
    assert program.work == set()
    assert gpus.contexts == {1}
    HandleWork(handle, [tensor]).wait()
    assert program.work == {"call"}


def test_a_continuation_is_complete_on_its_stream_and_makes_no_context_on_gpu_0(gpus: FakeGpus) -> None:
    found: list[Any] = []
    gpu = torch.device("cuda", 1)
    with gpus.device(gpu), gpus.stream(module._streams[gpu]):  # type: ignore[arg-type]
        complete = _on_these_streams([gpu], lambda: found.append(gpus.current_stream(gpu)))
    complete()
    assert found == [module._streams[gpu]]
    assert gpus.contexts == {1}
