"""GPUs as far as streams go: which work a stream is behind, and where a thread makes contexts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch


class FakeEvent:
    """A CUDA event."""

    def __init__(self) -> None:
        self.work: frozenset[str] = frozenset()

    def record(self, stream: FakeStream) -> None:
        self.work = frozenset(stream.work)

    def query(self) -> bool:
        return True


class FakeStream:
    """A stream; its work is what was queued on it, and what that is behind."""

    def __init__(self, device: Any) -> None:
        self.device = torch.device("cuda", _index(device))
        self.work: set[str] = set()

    def record_event(self) -> FakeEvent:
        event = FakeEvent()
        event.record(self)
        return event

    def wait_event(self, event: FakeEvent) -> None:
        self.work |= event.work

    def wait_stream(self, stream: FakeStream) -> None:
        self.wait_event(stream.record_event())


class FakeTensor:
    """A tensor on a GPU."""

    is_cuda, is_cpu, dtype, nbytes, shape = True, False, torch.float32, 4, (1,)

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.used_by: list[FakeStream] = []

    def record_stream(self, stream: FakeStream) -> None:
        assert stream.device == self.device
        self.used_by.append(stream)


class FakeGpus:
    """What a thread sees that has selected no GPU yet; :meth:`install` puts it in the place of ``torch.cuda``."""

    def __init__(self) -> None:
        self.current = 0
        #: The GPUs on which this process has a context.
        self.contexts: set[int] = set()
        self._streams: dict[int, FakeStream] = {}

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("device", "stream", "current_stream"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
        monkeypatch.setattr(torch.cuda, "Event", FakeEvent)

    def current_stream(self, device: Any = None) -> FakeStream:
        index = self.current if device is None else _index(device)
        return self._streams.setdefault(index, FakeStream(index))

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        """As in torch, the end makes no context on the former GPU."""
        before = self.current
        self._select(_index(device))
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        """As in torch, the end selects the former GPU."""
        before, replaced = self.current, self.current_stream(stream.device)
        self._set_stream(stream)
        try:
            yield
        finally:
            self._set_stream(replaced)
            self._select(before)

    def _set_stream(self, stream: FakeStream) -> None:
        self._select(_index(stream.device))
        self._streams[self.current] = stream

    def _select(self, index: int) -> None:
        if self.current != index:
            self.contexts.add(index)
        self.current = index


def _index(device: Any) -> int:
    return device if isinstance(device, int) else torch.device(device).index
