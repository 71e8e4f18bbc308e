"""Where steps end whose optimizer runs no Python.

It runs in functions that TensorFlow or JAX has compiled. Of such a step Python sees the callback that reduces the
gradients, in a thread of the framework, and where the program calls it as Keras does, the call of the whole function.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hvd_cluster.monitor.step_clock import COMPUTE, OPTIMIZER, OTHER, StepClock, step_clock

#: No call is known; one runs and has not reduced gradients; it has; it has returned before, because it only starts
#: what it computes.
_NO_CALL, _RUNNING, _REDUCED, _RETURNED = range(4)


class CallbackSteps:
    """Ends the steps of compiled functions in a clock.

    Once for each callback that reduces gradients.
    """

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._state = _NO_CALL

    @contextmanager
    def callback(self, *, ends_step: bool = False, arrived_s: float = 0.0) -> Iterator[None]:
        """A context for a callback of a compiled function.

        The thread that trains waits for it.

        Args:
            ends_step: the block reduces the gradients of a step, and nothing else reduces gradients of this step later.
            arrived_s: when the function had its batch, as ``time.monotonic()``; 0 if that is not known.
        """
        with self._clock.in_this_thread():
            if arrived_s and self._state in (_RUNNING, _REDUCED):
                self._clock.note_data(arrived_s)
            yield
            if ends_step:
                self._note_reduction()

    def _note_reduction(self) -> None:
        with self._lock:
            if self._state != _RUNNING:
                self._clock.end_step()
            if self._state == _RUNNING or self._state == _REDUCED:  # the update follows
                self._clock.enter(OPTIMIZER)
                self._state = _REDUCED
            elif self._state == _RETURNED:
                self._clock.enter(OTHER)

    @contextmanager
    def call(self, *, is_step: Callable[[], bool], is_async: bool) -> Iterator[None]:
        """A context for a call of a training function that makes steps.

        It makes one step or more, with their optimizer.

        Args:
            is_step: whether it has made a step, if neither a callback nor an optimizer has reported one.
            is_async: it may return before its callbacks are called.
        """
        clock = self._clock
        with self._lock:
            if self._state == _NO_CALL:
                clock.train_here()
            clock.enter(COMPUTE)
            self._state = _RUNNING
        num_steps, returned = clock.num_steps, False
        try:
            yield
            returned = True
        finally:
            with self._lock:
                state, self._state = self._state, _NO_CALL
                has_step = state == _REDUCED or (returned and clock.num_steps == num_steps and is_step())
                if has_step:
                    clock.end_step()
                if is_async and returned and clock.num_steps == num_steps:
                    self._state = _RETURNED
                else:
                    clock.enter(OTHER)


#: The steps of this process's clock.
callback_steps = CallbackSteps(step_clock)
