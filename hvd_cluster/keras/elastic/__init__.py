"""Elastic training with Keras: ``@hvd.elastic.run``, :class:`KerasState` and the callbacks that keep it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from hvd_cluster.elastic.loop import rejoin, run_fn
from hvd_cluster.elastic.state import ObjectState, State
from hvd_cluster.engine.compiled_steps import take_kept_error
from hvd_cluster.errors import HorovodInternalError
from hvd_cluster.keras.elastic.callbacks import (
    CommitStateCallback,
    UpdateBatchStateCallback,
    UpdateEpochStateCallback,
)
from hvd_cluster.keras.elastic.state import KerasState

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "ObjectState",
    "State",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]

T = TypeVar("T")

#: The packages whose errors come out of compiled steps.
_RUNTIMES = frozenset({"tensorflow", "jax", "jaxlib"})


def run(func: Callable[..., T]) -> Callable[..., T]:
    """Make a training function survive the loss and the arrival of workers.

    Args:
        func: its first argument is a :class:`State`; whatever it returns is returned. It is called again, with the
            state as of its last commit, when a worker was lost, and with the state as it is when workers came or left.
    """

    @functools.wraps(func)
    def translated(*args: Any, **kwargs: Any) -> T:
        take_kept_error()  # an earlier one
        try:
            return func(*args, **kwargs)
        except Exception as error:
            # Out of a compiled step comes an error of TensorFlow's or JAX's own.
            is_runtimes = type(error).__module__.partition(".")[0] in _RUNTIMES
            failure = take_kept_error() if is_runtimes and not isinstance(error, HorovodInternalError) else None
            if failure is None:
                raise
            raise failure from error

    return run_fn(translated, rejoin)
