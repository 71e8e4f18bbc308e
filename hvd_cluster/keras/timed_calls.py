"""Lets the step clock see Keras's training function and a model's saves."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any

import keras

from hvd_cluster.monitor.callback_steps import callback_steps
from hvd_cluster.monitor.step_clock import SAVE
from hvd_cluster.monitor.timed_calls import timed, timed_items


@lru_cache(maxsize=1)
def time_calls_of_keras(reports_steps: Callable[[Any], Callable[[], bool] | None]) -> None:
    """From now on these calls are timed; a second call has no effect.

    Args:
        reports_steps: of an optimizer: None if it is not distributed; else a function that says, after each call of
            the training function of its model, whether that made a step that the optimizer has not reported itself.
    """
    model_class: Any = keras.Model
    for name in ("save", "save_weights"):
        setattr(model_class, name, timed(getattr(model_class, name), SAVE))
    make = model_class.make_train_function
    is_jax = keras.backend.backend() == "jax"

    @wraps(make)
    def make_train_function(model: Any, *args: Any, **kwargs: Any) -> Any:
        made = make(model, *args, **kwargs)
        function = model.train_function
        is_step = reports_steps(model.optimizer)
        if is_step is not None and not hasattr(function, "is_timed"):
            model.train_function = _timed_step(function, is_step, is_jax)
        return made

    model_class.make_train_function = make_train_function


def _timed_step(function: Callable[..., Any], is_step: Callable[[], bool], is_jax: bool) -> Any:
    def train_function(*args: Any) -> Any:
        with callback_steps.call(is_step=is_step, is_async=is_jax):
            if is_jax:  # others take a batch, or take it inside of the compiled function
                state, items = args
                return function(state, timed_items(items))
            return function(*args)

    train_function.is_timed = True  # type: ignore[attr-defined]
    return train_function
