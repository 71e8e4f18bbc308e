"""The order in which NCCL's work is launched, over all process sets."""

from __future__ import annotations

from collections import deque
from typing import Protocol


class Launched(Protocol):
    """A bucket on its way; see :class:`hvd_cluster.engine.execution.Execution`."""

    is_launched: bool


class LaunchOrder:
    """Buckets that are launched one after the other, in the order of the log, whatever process set they belong to.

    NCCL's work runs on one stream of the GPU, in the order of its launches, and each piece ends when the other ranks
    have come to it. Two ranks that launch the work of two communicators in different orders wait for each other for
    ever. A bucket that has to learn sizes first is launched when these happen to arrive; until then the next one waits,
    of another process set too. It never does so for ever: the oldest bucket needs nothing that is younger.
    """

    def __init__(self) -> None:
        self._pending: deque[Launched] = deque()

    def add(self, bucket: Launched) -> None:
        """A bucket was decided."""
        self._pending.append(bucket)

    def is_turn_of(self, bucket: Launched) -> bool:
        """All before it are launched."""
        while self._pending and self._pending[0].is_launched:
            self._pending.popleft()
        return not self._pending or self._pending[0] is bucket

    def clear(self) -> None:
        """Nothing will be launched any more."""
        self._pending.clear()
