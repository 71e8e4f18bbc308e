"""The work that was launched on devices and may not be complete.

The handle of a request on a GPU is done when its work is launched. If the GPU never completes the work, no thread that
the engine knows of waits, so the engine polls it: when it adds more, and once a second.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hvd_cluster.engine.messages import Wait, WaitState
from hvd_cluster.engine.request import Key
from hvd_cluster.engine.transports.transport import Work

_POLL_S = 1.0


class Event(Protocol):
    """A :class:`torch.cuda.Event`."""

    def query(self) -> bool:
        """The device has reached it."""


@dataclass
class _LaunchedBucket:
    number: int
    keys: list[Key]
    works: list[Work]
    #: After these the inputs hold what was submitted.
    ready_events: list[Event]
    launched_s: float
    #: When the device was first seen to have computed the inputs.
    reached_s: float | None = None

    def is_complete(self) -> bool:
        return all(work.is_complete() for work in self.works)


class DeviceWork:
    """The launched buckets of one rank, oldest first. Only the progress thread uses it."""

    def __init__(self) -> None:
        self._buckets: deque[_LaunchedBucket] = deque()
        self._polled_s = 0.0
        # Buckets are launched in the order of the log.
        self._last_number = 0

    def __bool__(self) -> bool:
        return bool(self._buckets)

    def add(self, number: int, keys: list[Key], works: list[Work], ready_events: Sequence[Event]) -> None:
        """A bucket was launched."""
        while self._buckets and self._buckets[0].is_complete():
            self._buckets.popleft()
        self._last_number = number
        self._buckets.append(_LaunchedBucket(number, keys, works, list(ready_events), time.monotonic()))

    @property
    def next_poll_s(self) -> float | None:
        """When to call :meth:`poll`, or None."""
        return self._polled_s + _POLL_S if self._buckets else None

    def poll(self) -> None:
        """Forget the buckets that are complete.

        Raises:
            RuntimeError: the work of one of them has failed.
        """
        self._polled_s = now_s = time.monotonic()
        self._buckets = deque(bucket for bucket in self._buckets if not bucket.is_complete())
        for bucket in self._buckets:
            if bucket.reached_s is None and all(event.query() for event in bucket.ready_events):
                bucket.reached_s = now_s

    def waits(self) -> dict[Wait, float]:
        """What is not complete, and when it was launched."""
        return {Wait(key, bucket.number): bucket.launched_s for bucket in self._buckets for key in bucket.keys}

    def reached(self) -> dict[Wait, float]:
        """What is not complete although the device has reached it, and since when."""
        return {
            Wait(key, bucket.number): bucket.reached_s
            for bucket in self._buckets
            if bucket.reached_s is not None
            for key in bucket.keys
        }

    def state(self, wait: Wait) -> WaitState | None:
        """How this rank keeps the ranks waiting that have launched this bucket; None if it has completed it."""
        if wait.bucket > self._last_number:
            return WaitState.NOT_LAUNCHED
        for bucket in self._buckets:
            if bucket.number == wait.bucket:
                return WaitState.NOT_REACHED if bucket.reached_s is None else WaitState.NOT_COMPLETE
        return None

    def clear(self) -> None:
        """The work was aborted."""
        self._buckets.clear()
