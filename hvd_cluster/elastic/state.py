"""The state of a training function that survives the loss of workers."""

from __future__ import annotations

import copy
import logging
import queue
from collections.abc import Callable, Sequence
from enum import IntFlag
from typing import Any

from hvd_cluster.errors import HostsUpdatedInterrupt

logger = logging.getLogger(__name__)


class HostUpdateResult(IntFlag):
    """How the hosts have changed."""

    no_update = 0
    removed = 1
    added = 2
    mixed = 3


class State:
    """What one worker has of the job's progress. Subclasses say how it is saved, restored and made equal on all ranks.

    Args:
        bcast_object: gives every rank rank 0's object.
        get_rank: this worker's rank.
    """

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._host_messages: queue.SimpleQueue[tuple[float, HostUpdateResult]] = queue.SimpleQueue()
        self._last_updated_timestamp = 0.0
        self._is_told_of_worlds = False
        self._reset_callbacks: list[Callable[[], None]] = []
        #: How often :meth:`commit` was called.
        self.num_commits = 0

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], None]]) -> None:
        """Have ``callbacks`` called, in this order, whenever the workers have changed: to scale a rate, say."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """The world is a new one: forget what was said about the old one, then :meth:`reset`, then the callbacks."""
        while not self._is_told_of_worlds and not self._host_messages.empty():
            self._host_messages.get()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def begin_world(self, since: float) -> None:
        """News up to ``since`` is about worlds before; what is newer counts, even where it has come already.

        Args:
            since: when the present world was made, in seconds, by the clock of those who send the news.
        """
        self._is_told_of_worlds = True
        self._last_updated_timestamp = max(self._last_updated_timestamp, since)

    def on_hosts_updated(self, timestamp: float, update_res: HostUpdateResult) -> None:
        """Take the driver's word, from another thread, that the hosts have changed."""
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Save, then see whether the hosts have changed.

        Raises:
            HostsUpdatedInterrupt: they have, on all ranks alike.
        """
        self.save()
        self.num_commits += 1
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """See whether the hosts have changed; a collective call: what rank 0 has heard counts for all.

        Raises:
            HostsUpdatedInterrupt: they have, on all ranks alike.
        """
        latest, changes = self._last_updated_timestamp, HostUpdateResult.no_update
        while not self._host_messages.empty():
            timestamp, change = self._host_messages.get()
            if timestamp > latest:
                latest, changes = timestamp, changes | change
        before, latest, number = self._agree((self._last_updated_timestamp, latest, int(changes)))
        self._last_updated_timestamp = latest
        if latest > before:
            # Where workers only leave, those that stay are equal already.
            raise HostsUpdatedInterrupt(number == HostUpdateResult.removed)

    def _agree(self, news: tuple[float, float, int]) -> tuple[float, float, int]:
        """Rank 0's news on every rank."""
        agreed: tuple[float, float, int] = self._bcast_object(news)
        return agreed

    def save(self) -> None:
        """Keep the present state in memory, so that :meth:`restore` brings it back."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it is saved")

    def restore(self) -> None:
        """Go back to what was saved last."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it is restored")

    def sync(self) -> None:
        """Make the state of all ranks that of rank 0, and save it."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it is made equal on all ranks")

    def reset(self) -> None:
        """Adapt to a new world; nothing by default."""


class ObjectState(State):
    """Values that can be pickled, as attributes: ``ObjectState(bcast, rank, epoch=0, batch=0)``.

    Args:
        bcast_object: gives every rank rank 0's object.
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
        self._saved_state = {name: copy.deepcopy(getattr(self, name)) for name in self._saved_state}

    def restore(self) -> None:
        """Set the attributes to what was saved last."""
        for name, value in self._saved_state.items():
            setattr(self, name, copy.deepcopy(value))

    def sync(self) -> None:
        """Set the attributes to those of rank 0, and save them."""
        if self._saved_state:
            now = {name: getattr(self, name) for name in self._saved_state}
            for name, value in self._bcast_object(now).items():
                setattr(self, name, value)
        self.save()
