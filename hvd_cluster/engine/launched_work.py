"""The buckets that this rank has launched and that are not complete.

On a GPU a handle is done when its work is launched. If the GPU never completes the work, no thread that the engine
knows of waits for it. So the engine polls what it has launched: when it launches more, and once a second.
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
class Launch:
    """What the engine has to know of a launched bucket. It does not keep the tensors of a bucket that is done."""

    #: Grows while the bucket is executed.
    works: list[Work]
    #: After these, the inputs hold what was submitted.
    ready_events: list[Event]
    #: How long a slow network takes for it; None if the transport itself limits the time.
    transfer_s: float | None
    #: All of its handles have their results, even if a device still works on them.
    is_done: bool = False

    def finish(self) -> None:
        """All of its handles have their results."""
        self.is_done = True
        if self.transfer_s is None:
            self.works.clear()

    def is_complete(self) -> bool:
        """Its work is done, on the device too; never blocks.

        Raises:
            RuntimeError: the device has failed.
        """
        return self.is_done and all(work.is_complete() for work in self.works)

    def has_inputs(self) -> bool:
        """The device has finished the earlier work that computes the inputs; never blocks."""
        return all(event.query() for event in self.ready_events)


@dataclass
class _Entry:
    number: int
    keys: Sequence[Key]
    launch: Launch
    launched_s: float
    #: When the device was first seen to have computed the inputs.
    reached_s: float | None = None


class LaunchedWork:
    """The launched buckets of one rank, oldest first. Only the progress thread uses it."""

    def __init__(self) -> None:
        #: The requests of the bucket that was begun last.
        self.latest: Sequence[Key] = ()
        self._entries: deque[_Entry] = deque()
        self._polled_s = 0.0
        # Buckets are launched in the order of the log.
        self._last_number = 0

    def __bool__(self) -> bool:
        return bool(self._entries)

    def add(self, number: int, keys: Sequence[Key], launch: Launch) -> None:
        """The bucket with this number in the log is launched."""
        while self._entries and self._entries[0].launch.is_complete():
            self._entries.popleft()
        self._last_number = number
        self._entries.append(_Entry(number, keys, launch, time.monotonic()))

    @property
    def next_poll_s(self) -> float | None:
        """When to call :meth:`poll`, or None."""
        return self._polled_s + _POLL_S if self._entries else None

    def poll(self) -> None:
        """Forget the buckets that are complete.

        Raises:
            RuntimeError: the work of one of them has failed.
        """
        self._polled_s = now_s = time.monotonic()
        self._entries = deque(entry for entry in self._entries if not entry.launch.is_complete())
        for entry in self._entries:
            if entry.reached_s is None and entry.launch.has_inputs():
                entry.reached_s = now_s

    def waits(self) -> dict[Wait, float]:
        """What is not complete, and when it was launched."""
        return {Wait(key, entry.number): entry.launched_s for entry in self._entries for key in entry.keys}

    def on_devices(self) -> dict[Wait, float | None]:
        """What devices have not completed, and when they should have if communication took no time but the transfer.

        It is None where the device has not reached it.
        """
        return {
            Wait(key, entry.number): None if entry.reached_s is None else entry.reached_s + entry.launch.transfer_s
            for entry in self._entries
            if entry.launch.transfer_s is not None
            for key in entry.keys
        }

    def state(self, wait: Wait) -> WaitState | None:
        """How this rank keeps the ranks waiting that have launched this bucket; None if it has completed it."""
        if wait.bucket > self._last_number:
            return WaitState.NOT_LAUNCHED
        for entry in self._entries:
            if entry.number == wait.bucket:
                return WaitState.NOT_REACHED if entry.reached_s is None else WaitState.NOT_COMPLETE
        return None

    def clear(self) -> None:
        """The work was aborted."""
        self._entries.clear()
