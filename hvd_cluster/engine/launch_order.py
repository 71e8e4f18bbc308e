"""The order in which NCCL's work is launched, over all process sets."""

from __future__ import annotations

from collections import deque
from typing import Protocol


class Launched(Protocol):
    """A bucket that is being executed; see :class:`hvd_cluster.engine.execution.Execution`."""

    is_launched: bool


class LaunchOrder:
    """Buckets are launched one after the other in the order of the log, whatever process set they belong to.

    NCCL's work runs on one stream of the GPU in the order of its launches, and ends when the other ranks have reached
    it. Two ranks that launch the work of two communicators in different orders would wait for each other forever. A
    bucket that first has to learn sizes is launched when they arrive; until then the next bucket waits, even one of
    another process set. This always ends, because the oldest bucket does not depend on later ones.
    """

    def __init__(self) -> None:
        self._pending: deque[Launched] = deque()

    def add(self, bucket: Launched) -> None:
        """A bucket was decided."""
        self._pending.append(bucket)

    def is_turn_of(self, bucket: Launched) -> bool:
        """All earlier buckets are launched."""
        while self._pending and self._pending[0].is_launched:
            self._pending.popleft()
        return not self._pending or self._pending[0] is bucket

    def clear(self) -> None:
        """Nothing will be launched any more."""
        self._pending.clear()
