"""Streams of GPUs: this package's, and how a thread uses those of several GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch


class OwnStreams:
    """A stream for each GPU, made on first use, on which programs do not compute."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def __getitem__(self, gpu: torch.device) -> torch.cuda.Stream:
        """The stream of a GPU, which has an index."""
        stream = self._streams.get(gpu)
        return self._streams.setdefault(gpu, torch.cuda.Stream(gpu)) if stream is None else stream


@contextmanager
def on_streams(streams: Sequence[torch.cuda.Stream]) -> Iterator[None]:
    """Inside, make each stream current on its GPU, and the first one's GPU current.

    ``torch.cuda.stream()`` alone returns to the thread's former GPU by selecting it. That makes a context there, of
    hundreds of MB: a thread that has selected none has GPU 0, which belongs to another rank.
    """
    with ExitStack() as stack:
        for stream in reversed(streams):
            stack.enter_context(torch.cuda.device(stream.device))
            stack.enter_context(torch.cuda.stream(stream))
        yield


_joining = OwnStreams()


@contextmanager
def behind(streams: Sequence[torch.cuda.Stream]) -> Iterator[None]:
    """Order work inside after that of ``streams`` and their GPUs' current streams.

    None of them waits for another one: if they differ, the work inside is on streams of this package.
    """
    current = {stream.device: torch.cuda.current_stream(stream.device) for stream in streams}
    if all(stream == current[stream.device] for stream in streams):
        yield
        return
    joining = [_joining[gpu] for gpu in current]
    for one in joining:
        for stream in {*current.values(), *streams}:
            one.wait_stream(stream)
    with on_streams(joining):
        yield
