"""Elastic training with Keras: ``@hvd.elastic.run``, :class:`KerasState` and the callbacks that update it."""

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

#: The packages whose errors a compiled step raises.
_RUNTIMES = frozenset({"tensorflow", "jax", "jaxlib"})


def run(func: Callable[..., T]) -> Callable[..., T]:
    """Let a training function continue when workers are lost or added.

    Args:
        func: its first argument is a :class:`State`; its return value is returned. After the loss of a worker it is
            called again with the state of the last commit; after other changes of the workers, with the current state.
    """

    @functools.wraps(func)
    def translated(*args: Any, **kwargs: Any) -> T:
        take_kept_error()  # discard an earlier error
        try:
            return func(*args, **kwargs)
        except Exception as error:  # of any class: raised again, or as the error that it stands for
            # A compiled step raises TensorFlow's or JAX's error in place of the original one.
            is_runtimes = type(error).__module__.partition(".")[0] in _RUNTIMES
            failure = take_kept_error() if is_runtimes and not isinstance(error, HorovodInternalError) else None
            if failure is None:
                raise
            raise failure from error

    return run_fn(translated, rejoin)
