"""The buckets that this rank has launched and that are not complete.

On a GPU a handle is done when its work is launched. If the GPU never completes the work, no thread that the engine
knows of waits for it. So the engine polls what it has launched: when it launches more and, if a bucket takes longer
than some seconds, once a second.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hvd_cluster.engine.messages import Wait, WaitState
from hvd_cluster.engine.signature import Key, SetId
from hvd_cluster.engine.transports.transport import Work
from hvd_cluster.settings import Settings

_POLL_S = 1.0
#: How long after its launch a bucket is polled first, at the latest. Most are complete before, and a poll can spoil a
#: CUDA graph that another thread captures.
_FIRST_POLL_S = 5.0
#: A poll that comes later than this was not only delayed by other work.
_MAX_DELAY_S = 3.0


class Event(Protocol):
    """A :class:`torch.cuda.Event`."""

    def query(self) -> bool:
        """The device has reached it."""


@dataclass
class Launch:
    """What the engine knows of a launched bucket, without tensors once it is done."""

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
        """Whether the device has finished the work that computes inputs; never blocks."""
        return all(event.query() for event in self.ready_events)


@dataclass
class _Entry:
    number: int
    keys: Sequence[Key]
    launch: Launch
    launched_s: float
    #: When the device was first seen to have computed the inputs.
    reached_s: float | None = None

    @property
    def process_set_id(self) -> SetId:
        return self.keys[0][0]


class LaunchedWork:
    """The launched buckets of one rank, oldest first, for the progress thread only.

    Args:
        settings: the times are read.
    """

    def __init__(self, settings: Settings) -> None:
        #: The requests of the bucket that was begun last.
        self.latest: Sequence[Key] = ()
        self._first_poll_s = min(_FIRST_POLL_S, settings.stall_warning_s, settings.gloo_timeout_s / 2)
        self._entries: deque[_Entry] = deque()
        self._polled_s = 0.0
        #: For each process set, the number of the bucket that was launched last: they are launched in the log's order.
        self._last_numbers: dict[SetId, int] = {}
        #: For each process set, when a bucket was last seen to be complete. A device works on one after the other.
        self._progressed_s: dict[SetId, float] = {}

    def __bool__(self) -> bool:
        return bool(self._entries)

    def add(self, number: int, keys: Sequence[Key], launch: Launch) -> None:
        """The bucket with this number in the log is launched."""
        now_s = time.monotonic()
        while self._entries and self._entries[0].launch.is_complete():
            self._progressed_s[self._entries.popleft().process_set_id] = now_s
        entry = _Entry(number, keys, launch, now_s)
        self._last_numbers[entry.process_set_id] = number
        self._entries.append(entry)

    def drop_finished(self) -> None:
        """Forget the oldest buckets, up to the first in progress or on a device."""
        while self._entries and self._entries[0].launch.is_done and not self._entries[0].launch.works:
            self._entries.popleft()

    def is_complete(self) -> bool:
        """All of them are complete now.

        Raises:
            RuntimeError: the device has failed.
        """
        return all(entry.launch.is_complete() for entry in self._entries)

    @property
    def oldest_s(self) -> float | None:
        """When the oldest of them was launched."""
        return self._entries[0].launched_s if self._entries else None

    @property
    def next_poll_s(self) -> float | None:
        """When to call :meth:`poll`, or None."""
        if not self._entries:
            return None
        return max(self._polled_s + _POLL_S, self._entries[0].launched_s + self._first_poll_s)

    def poll(self) -> None:
        """Forget the buckets that are complete.

        Raises:
            RuntimeError: the work of one of them has failed.
        """
        now_s = time.monotonic()
        # If polls are late, this process was stopped for a while, and with it the other ranks, possibly.
        was_stopped = self._entries and now_s - (self.next_poll_s or now_s) > _MAX_DELAY_S
        self._polled_s = now_s
        waiting: deque[_Entry] = deque()
        for entry in self._entries:
            if entry.launch.is_complete():
                self._progressed_s[entry.process_set_id] = now_s
            else:
                waiting.append(entry)
        self._entries = waiting
        for entry in waiting:
            if entry.reached_s is None and entry.launch.has_inputs():
                entry.reached_s = now_s
            if was_stopped:
                self._progressed_s[entry.process_set_id] = now_s

    def waits(self) -> dict[Wait, float]:
        """What is not complete, and when it was launched."""
        return {Wait(key, entry.number): entry.launched_s for entry in self._entries for key in entry.keys}

    def on_devices(self) -> dict[Wait, float | None]:
        """What devices have not completed, and since when only the transfer delays it.

        It is None where the device has not reached it.
        """
        found: dict[Wait, float | None] = {}
        for entry in self._entries:
            if entry.launch.transfer_s is None:
                continue
            since_s = None
            if entry.reached_s is not None:
                begun_s = max(entry.reached_s, self._progressed_s.get(entry.process_set_id, 0.0))
                since_s = begun_s + entry.launch.transfer_s
            found |= dict.fromkeys((Wait(key, entry.number) for key in entry.keys), since_s)
        return found

    def state(self, wait: Wait) -> WaitState | None:
        """How this rank delays the ranks that launched a bucket; None if it is completed.

        This asks the device: since the last poll, it may have completed what another rank has not.

        Raises:
            RuntimeError: the device has failed.
        """
        if wait.bucket > self._last_numbers.get(wait.key[0], 0):
            return WaitState.NOT_LAUNCHED
        for entry in self._entries:
            if entry.number == wait.bucket and not entry.launch.is_complete():
                has_inputs = entry.reached_s is not None or entry.launch.has_inputs()
                return WaitState.NOT_COMPLETE if has_inputs else WaitState.NOT_REACHED
        return None

    def clear(self) -> None:
        """The work was aborted."""
        self._entries.clear()
