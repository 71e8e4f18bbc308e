"""How long each training step of this process spends on what.

The clock is always in exactly one activity: begun inside another one, an activity interrupts it. So the times
of a step add up to its duration. It runs only on the thread that trains, and it is the host's clock: work that a GPU
does asynchronously shows where the host waits for it.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from operator import add
from typing import NamedTuple, Protocol

#: The activities of a step. Plain numbers, because an access to a member of an Enum takes as long as a whole span.
DATA, COMPUTE, LATE, TRANSFER, OPTIMIZER, SAVE, OTHER = range(7)
#: Their names, by number.
ACTIVITIES = ("data", "compute", "late", "transfer", "optimizer", "save", "other")


class StepTime(NamedTuple):
    """Seconds of one training step of this rank, up to its end.

    It begins at the end of the step before.
    """

    #: Waiting for the next batch.
    data_s: float
    #: Forward and backward.
    compute_s: float
    #: Waiting until the last rank has reached a collective operation.
    late_s: float
    #: Waiting for a collective operation that all ranks have reached.
    transfer_s: float
    #: The optimizer's own step.
    optimizer_s: float
    #: Checkpoints and commits.
    save_s: float
    #: The rest: logging, metrics, callbacks.
    other_s: float

    @property
    def total_s(self) -> float:
        """The duration of the step."""
        return sum(self)


class StepObserver(Protocol):
    """Learns of everything that the clock measures; times are ``time.monotonic()``."""

    def note_activity(self, activity: int, start_s: float, end_s: float) -> None:
        """The training thread has done this without an interruption."""

    def note_step(self, number: int, start_s: float, end_s: float, step: StepTime) -> None:
        """A step has ended."""


_ZERO = StepTime(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
#: After a step: OTHER if the step that follows waits for data later on, and its forward pass if it does not.
_BETWEEN_STEPS = 7
_MAX_STEPS = 2048
#: The steps after the n-th ``hvd.join()`` of all ranks are numbered from n times this.
NUMBERS_PER_JOIN = 1_000_000_000


class StepClock:
    """Measures the steps of one process.

    Other threads call only :meth:`recent`, :meth:`since` and :meth:`end_join`.
    """

    def __init__(self) -> None:
        self._thread: int | None = threading.main_thread().ident
        #: Threads for which the one that trains waits.
        self._stand_ins: set[int] = set()
        #: The number of steps since :meth:`restart`.
        self.num_steps = 0
        #: The number of the next step: the same count, until a join.
        self._number = 0
        #: Each with its number.
        self._steps: deque[tuple[int, StepTime]] = deque(maxlen=_MAX_STEPS)
        #: The number of steps, and seconds of each activity in all of them.
        self.totals: tuple[int, StepTime] = (0, _ZERO)
        self._times = [0.0] * (_BETWEEN_STEPS + 1)
        self._current = _BETWEEN_STEPS
        self._since_s = self._began_s = time.monotonic()
        #: Inside :meth:`update`.
        self.is_updating = False
        #: The timeline, while one is recorded.
        self.observer: StepObserver | None = None

    @property
    def thread(self) -> int | None:
        """The identifier of the thread that trains."""
        return self._thread

    @property
    def activity(self) -> int:
        """What the thread that trains does now."""
        return OTHER if self._current == _BETWEEN_STEPS else self._current

    def restart(self) -> None:
        """Begin with step 0 in this thread.

        A world begins, and all ranks count its steps alike.
        """
        self._thread = threading.get_ident()
        self.num_steps = self._number = 0
        self._steps.clear()
        self.totals = (0, _ZERO)
        self._times = [0.0] * (_BETWEEN_STEPS + 1)
        self._current = _BETWEEN_STEPS
        self._since_s = self._began_s = time.monotonic()

    def enter(self, activity: int) -> int:
        """Begin an activity, and return what :meth:`leave` takes.

        That is -1 in threads that do not train, which are ignored.
        """
        if not self._trains_here():
            return -1
        before = self._current
        self._switch(activity)
        return before

    def leave(self, before: int, *, is_end_of_data: bool = False) -> None:
        """End the activity for which :meth:`enter` has returned ``before``.

        What follows data is computation.

        Args:
            before: the return value.
            is_end_of_data: it was a wait for data, and there were none: no computation follows.
        """
        if before < 0 or not self._trains_here():
            return
        is_fetched = self._current == DATA and before == _BETWEEN_STEPS and not is_end_of_data
        self._switch(COMPUTE if is_fetched else before)

    @contextmanager
    def span(self, activity: int) -> Iterator[None]:
        """A context for an activity.

        If it is a wait for data that ends with ``StopIteration``, there were none.
        """
        before = self.enter(activity)
        is_over = False
        try:
            yield
        except StopIteration:
            is_over = True
            raise
        finally:
            self.leave(before, is_end_of_data=is_over)

    @contextmanager
    def update(self, *, ends_step: bool = True) -> Iterator[None]:
        """Mark the block as an update that ends a step, or as part of the one around it.

        Args:
            ends_step: False for a part of the update before, or of the next one.
        """
        if self.is_updating:
            yield
            return
        self.is_updating = True
        try:
            with self.span(OPTIMIZER):
                yield
        finally:
            self.is_updating = False
        if ends_step:
            self.end_step()

    @contextmanager
    def in_this_thread(self) -> Iterator[None]:
        """The thread that trains waits for this block, whatever thread it runs in."""
        thread = threading.get_ident()
        is_known = self._trains_here()
        self._stand_ins.add(thread)
        try:
            yield
        finally:
            if not is_known:
                self._stand_ins.discard(thread)

    def note_wait(self, begun_s: float, decided_s: float, until_s: float = math.inf) -> None:
        """Note a wait since ``begun_s`` for what all ranks had reached at ``decided_s``.

        All are ``time.monotonic()``; ``decided_s`` is 0 if the operation has failed before. The wait has ended at
        ``until_s``, by default now.
        """
        if not self._trains_here():
            return
        now_s = min(until_s, time.monotonic())
        # No rank was late if the operation was decided before this thread waited for it.
        if begun_s > self._since_s:
            self._add(self._current, begun_s)
        if not decided_s:
            decided_s = now_s
        if decided_s > self._since_s:
            self._add(LATE, decided_s)
        if now_s > self._since_s:
            self._add(TRANSFER, now_s)

    def note_data(self, until_s: float) -> None:
        """Note that the thread that trains has waited for data until ``until_s``.

        That is ``time.monotonic()``.
        """
        if not self._trains_here():
            return
        self._add(DATA, min(max(until_s, self._since_s), time.monotonic()))

    def train_here(self) -> None:
        """The thread that calls this is the one that trains."""
        self._thread = threading.get_ident()

    def end_join(self) -> None:
        """Note that all ranks have joined, after different numbers of steps.

        From here on, equal numbers mean the same step.
        """
        self._number = (self._number // NUMBERS_PER_JOIN + 1) * NUMBERS_PER_JOIN

    def end_step(self) -> None:
        """Note that the optimizer has applied its update.

        The thread that trains calls this, or one for which it waits.
        """
        if not self._trains_here():
            self._thread = threading.get_ident()
        self._switch(_BETWEEN_STEPS)
        *times, between_s = self._times
        times[OTHER if times[DATA] else COMPUTE] += between_s
        self._times = [0.0] * (_BETWEEN_STEPS + 1)
        if self.num_steps:  # the first one has begun with the program
            step, number = StepTime(*times), self._number
            self._steps.append((number, step))
            self.totals = (self.totals[0] + 1, StepTime(*map(add, self.totals[1], step)))
            observer = self.observer
            if observer is not None:
                observer.note_step(number, self._began_s, self._since_s, step)
        self.num_steps += 1
        self._number += 1
        self._began_s = self._since_s

    def recent(self, max_steps: int | None = None) -> list[StepTime]:
        """The last steps, oldest first; at most 2048 are kept.

        The first one of a world never is.
        """
        steps = [each for _, each in list(self._steps)]
        return steps if max_steps is None else steps[max(0, len(steps) - max_steps) :]

    def since(self, number: int) -> dict[int, StepTime]:
        """The steps from this number on, as far as they are kept, by their numbers."""
        return {each: step for each, step in list(self._steps) if each >= number}

    def _trains_here(self) -> bool:
        thread = threading.get_ident()
        return thread == self._thread or thread in self._stand_ins

    def _switch(self, activity: int) -> None:
        self._add(self._current, time.monotonic())
        self._current = activity

    def _add(self, activity: int, until_s: float) -> None:
        """The time since the last call was ``activity``."""
        if until_s > self._since_s:
            self._times[activity] += until_s - self._since_s
        observer = self.observer
        if observer is not None and activity != _BETWEEN_STEPS:
            observer.note_activity(activity, self._since_s, until_s)
        self._since_s = until_s


#: The clock of this process.
step_clock = StepClock()
