"""The state of a training function that survives the loss of workers."""

from __future__ import annotations

import copy
import logging
import queue
from collections.abc import Callable, Sequence
from enum import IntFlag
from typing import Any

import cloudpickle

from hvd_cluster.errors import HostsUpdatedInterrupt
from hvd_cluster.monitor.step_clock import SAVE, step_clock

logger = logging.getLogger(__name__)


def copied(value: Any) -> Any:
    """A copy of a value, through pickle if ``copy.deepcopy`` fails.

    It shares nothing with the value. ``deepcopy`` refuses a tensor that was computed, such as a loss, and some objects
    that can be pickled.

    Raises:
        Exception: of any kind: pickle fails too.
    """
    try:
        return copy.deepcopy(value)
    except Exception:  # noqa: BLE001 - copying runs user code, which may raise anything
        return cloudpickle.loads(cloudpickle.dumps(value))


class HostUpdateResult(IntFlag):
    """How the hosts have changed."""

    no_update = 0
    removed = 1
    added = 2
    mixed = 3


class State:
    """The training state of one worker.

    Subclasses define how it is saved, restored and synchronized between ranks.

    Args:
        bcast_object: returns rank 0's object on every rank.
        get_rank: this worker's rank.
    """

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._host_messages: queue.SimpleQueue[tuple[float, HostUpdateResult]] = queue.SimpleQueue()
        self._last_updated_timestamp = 0.0
        self._knows_worlds = False
        self._reset_callbacks: list[Callable[[], None]] = []
        #: How often :meth:`commit` was called.
        self.num_commits = 0

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], None]]) -> None:
        """Call functions, in this order, whenever the workers have changed.

        One may scale a rate, for example.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Start in a new world: call :meth:`reset`, then the callbacks.

        Notifications about the old world are dropped before.
        """
        while not self._knows_worlds and not self._host_messages.empty():
            self._host_messages.get()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def begin_world(self, since: float) -> None:
        """Ignore notifications up to ``since``: they concern earlier worlds.

        Args:
            since: creation time of the current world, in seconds of the driver's clock.
        """
        self._knows_worlds = True
        self._last_updated_timestamp = max(self._last_updated_timestamp, since)

    def on_hosts_updated(self, timestamp: float, update_res: HostUpdateResult) -> None:
        """Queue the driver's notification that the hosts have changed.

        Called from another thread.
        """
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Save the state, then check whether the hosts have changed.

        Raises:
            HostsUpdatedInterrupt: they have; raised on all ranks.
        """
        with step_clock.span(SAVE):
            self.save()
        self.num_commits += 1
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Check whether the hosts have changed.

        A collective call, in which rank 0's notifications count for all ranks.

        Raises:
            HostsUpdatedInterrupt: they have; raised on all ranks.
        """
        latest, changes = self._last_updated_timestamp, HostUpdateResult.no_update
        while not self._host_messages.empty():
            timestamp, change = self._host_messages.get()
            if timestamp > latest:
                latest, changes = timestamp, changes | change
        before, latest, number = self._agree((self._last_updated_timestamp, latest, int(changes)))
        self._last_updated_timestamp = latest
        if latest > before:
            # If workers have only left, the remaining ones are equal already.
            raise HostsUpdatedInterrupt(number == HostUpdateResult.removed)

    def _agree(self, update: tuple[float, float, int]) -> tuple[float, float, int]:
        """Rank 0's notification on every rank."""
        agreed: tuple[float, float, int] = self._bcast_object(update)
        return agreed

    def save(self) -> None:
        """Keep the current state in memory for :meth:`restore`."""
        raise NotImplementedError(f"{type(self).__name__} does not implement save()")

    def restore(self) -> None:
        """Restore the state that was saved last."""
        raise NotImplementedError(f"{type(self).__name__} does not implement restore()")

    def sync(self) -> None:
        """Copy rank 0's state to all ranks, and save it."""
        raise NotImplementedError(f"{type(self).__name__} does not implement sync()")

    def reset(self) -> None:
        """Adapt to a new world; nothing by default."""


class ObjectState(State):
    """Picklable values as attributes: ``ObjectState(bcast, rank, epoch=0, batch=0)``.

    Args:
        bcast_object: returns rank 0's object on every rank.
        get_rank: this worker's rank.
        kwargs: the attributes and their first values.
    """

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved_state: dict[str, Any] = kwargs
        for name, value in kwargs.items():
            setattr(self, name, value)

    def save(self) -> None:
        """Keep copies of the attributes."""
        self._saved_state = {name: copied(getattr(self, name)) for name in self._saved_state}

    def restore(self) -> None:
        """Set the attributes to the values that were saved last."""
        for name, value in self._saved_state.items():
            setattr(self, name, copied(value))

    def sync(self) -> None:
        """Set the attributes to those of rank 0, and save them."""
        if self._saved_state:
            now = {name: getattr(self, name) for name in self._saved_state}
            for name, value in self._bcast_object(now).items():
                setattr(self, name, value)
        self.save()
