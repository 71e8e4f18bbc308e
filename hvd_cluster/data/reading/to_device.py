"""Batches on a GPU, copied while the batch before them is used.

They come from page-locked memory, on a stream of their own.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch

from hvd_cluster.data.reading.read_ahead import ReadAhead

#: Smaller batches are copied when they are asked for: a thread and a stream would take longer than the copy.
MIN_BYTES = 1 << 20
#: How long the end waits for a batch that is being read.
_END_S = 30.0

Batch = TypeVar("Batch", bound="dict[str, Any]")


class ToDevice:
    """Copies the tensors of batches to a device.

    A context manager: its end ends what is copied ahead. A GPU holds up to three batches: one that is used, one that is
    ready, and one that is being copied.

    Args:
        device: to which; batches for the CPU stay as they are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        #: One for all iterations, because the allocator keeps the memory of each stream apart.
        self._stream: torch.cuda.Stream | None = None
        self._threads: list[ReadAhead[Any]] = []

    def __enter__(self) -> ToDevice:
        return self

    def __exit__(self, *exc_info: object) -> None:
        # A traceback may keep the iteration of an epoch that has failed, whose own end would come too late.
        for thread in self._threads:
            thread.close(_END_S)

    def __call__(self, batches: Iterable[Batch], *, ahead: bool = True) -> Iterator[Batch]:
        """The batches, with their tensors on the device.

        If the first batch has at least :data:`MIN_BYTES`, a thread takes and copies one batch ahead, and neither the
        caller nor the compute stream waits for a copy.

        Args:
            batches: dicts, or instances of a subclass that ``copy.copy`` can copy.
            ahead: a batch may be taken before it is asked for, in another thread.
        """
        if self._device.type == "cpu":
            yield from batches
            return
        source = iter(batches)
        first = next(source, None)
        if first is None:
            return
        is_large = sum(tensor.nbytes for tensor in _tensors(first).values()) >= MIN_BYTES
        source = itertools.chain(iter([first]), source)
        del first
        if ahead and is_large and self._device.type == "cuda":
            yield from self._copied_ahead(source)
        else:
            for batch in source:
                yield with_tensors(batch, {name: one.to(self._device) for name, one in _tensors(batch).items()})

    def _copied_ahead(self, source: Iterator[Batch]) -> Iterator[Batch]:
        device = self._device
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        stream = self._stream

        def copied(*_: object) -> list[Any]:
            torch.cuda.set_device(device)  # each thread has its own current device, at first GPU 0
            batch = next(source, None)
            if batch is None:
                return []
            with torch.cuda.stream(stream):
                pinned = {name: tensor.pin_memory() for name, tensor in _tensors(batch).items()}
                moved = {name: tensor.to(device, non_blocking=True) for name, tensor in pinned.items()}
                return [stream.record_event(), with_tensors(batch, moved)]

        name = "hvd-to-device"
        thread = ReadAhead(copied, itertools.repeat(1), num_threads=1, limit_bytes=1, name=name, warns=False)
        self._threads.append(thread)
        try:
            while taken := thread.take():
                _hand_over(*taken)
                yield taken.pop()  # it is not kept here while the caller uses it
        finally:
            thread.close(_END_S)
            self._threads.remove(thread)


def _hand_over(copied: torch.cuda.Event, batch: dict[str, Any]) -> None:
    """Let the current stream read the batch once it is copied."""
    current = torch.cuda.current_stream()
    current.wait_event(copied)
    for tensor in _tensors(batch).values():
        tensor.record_stream(current)  # the other stream must not get the memory back while this one reads it


def _tensors(batch: Batch) -> dict[str, torch.Tensor]:
    return {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}


def with_tensors(batch: Batch, tensors: dict[str, torch.Tensor]) -> Batch:
    """A batch of the same type and attributes, with other tensors.

    They replace those of their names.
    """
    found = copy.copy(batch)
    found.update(tensors)
    return found
