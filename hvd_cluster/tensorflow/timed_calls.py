"""Lets the step clock see that a program waits for a ``tf.data.Dataset``."""

from __future__ import annotations

from functools import lru_cache

from tensorflow.python.data.ops.iterator_ops import OwnedIterator

from hvd_cluster.monitor.step_clock import DATA
from hvd_cluster.monitor.timed_calls import timed


@lru_cache(maxsize=1)
def time_calls_of_tensorflow() -> None:
    """From now on these calls are timed; a second call has no effect."""
    OwnedIterator.__next__ = timed(OwnedIterator.__next__, DATA)
