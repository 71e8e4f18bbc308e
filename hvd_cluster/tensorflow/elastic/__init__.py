"""Elastic training with TensorFlow: ``@hvd.elastic.run``, :class:`TensorFlowState`, :class:`TensorFlowKerasState`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

from hvd_cluster.elastic.loop import rejoin, run_fn
from hvd_cluster.elastic.state import ObjectState, State
from hvd_cluster.engine.compiled_steps import take_kept_error
from hvd_cluster.errors import HorovodInternalError
from hvd_cluster.tensorflow.elastic.state import TensorFlowKerasState, TensorFlowState

__all__ = ["ObjectState", "State", "TensorFlowKerasState", "TensorFlowState", "run"]

T = TypeVar("T")


def run(func: Callable[..., T]) -> Callable[..., T]:
    """Let a training function continue when workers are lost or added.

    Args:
        func: its first argument is a :class:`State`; its return value is returned. After the loss of a worker it is
            called again with the state of the last commit; after other changes of the workers, with the current state.
            A collective that failed inside a graph counts as a lost worker; other TensorFlow errors are raised.
    """

    @functools.wraps(func)
    def translated(*args: Any, **kwargs: Any) -> T:
        take_kept_error()  # discard an earlier error
        try:
            return func(*args, **kwargs)
        except tf.errors.OpError as error:
            failure = None if isinstance(error, HorovodInternalError) else take_kept_error()
            if failure is None:
                raise
            raise failure from error

    return run_fn(translated, rejoin)
