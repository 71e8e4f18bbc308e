"""Keeps a distributed step from XLA, which does not call back into Python, where Keras would compile it by itself."""

from __future__ import annotations

from typing import Any

import keras


def keep_from_xla(distributed: type) -> None:
    """Have ``jit_compile="auto"`` mean False for models whose optimizer is a ``distributed`` one; others are as before.

    Keras decides it in a method of the model, and asks the optimizer nothing. An explicit ``jit_compile=True`` is left
    alone: the collective refuses it when the step is traced.
    """
    resolve: Any = keras.Model._resolve_auto_jit_compile
    if getattr(resolve, "asks_optimizer", False):
        return

    def resolved(model: Any) -> bool:
        optimizer = getattr(model, "optimizer", None)
        if isinstance(getattr(optimizer, "inner_optimizer", optimizer), distributed):
            return False
        return bool(resolve(model))

    resolved.asks_optimizer = True  # type: ignore[attr-defined]
    keras.Model._resolve_auto_jit_compile = resolved
