"""The states of Keras's own callbacks: counts, and the best so far. Needs Keras."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from hvd_cluster.estimators.keras.state import as_tensors

_KINDS = (keras.callbacks.EarlyStopping, keras.callbacks.ReduceLROnPlateau, keras.callbacks.ModelCheckpoint)
_NUMBERS = (
    "wait",
    "stopped_epoch",
    "best",
    "best_epoch",
    "cooldown_counter",
    # Batches, for a ``save_freq`` in batches.
    "_last_batch_seen",
    "_batches_seen_since_last_saving",
)


class CallbackStates:
    """Saved states of callbacks, by which a resumed fit stops as an undisturbed one.

    Args:
        callbacks: the user's; those of other classes start from their initial state.
        found: what :meth:`capture` returned; None for a new run.
    """

    def __init__(self, callbacks: Sequence[Any], found: Mapping[int, Mapping[str, Any]] | None) -> None:
        self._callbacks = {index: one for index, one in enumerate(callbacks) if isinstance(one, _KINDS)}
        self._found = found or {}

    def capture(self) -> dict[int, dict[str, Any]]:
        """The state of each callback, by its index."""
        return {
            index: {
                "numbers": {
                    name: np.asarray(value).item()
                    for name in _NUMBERS
                    if (value := getattr(callback, name, None)) is not None
                },
                "best_weights": as_tensors(getattr(callback, "best_weights", None) or []),
            }
            for index, callback in self._callbacks.items()
        }

    def restore(self) -> None:
        """Restore the states. To be called after ``on_train_begin``, which resets them."""
        for index, callback in self._callbacks.items():
            state = self._found.get(index, {"numbers": {}, "best_weights": []})
            for name, value in state["numbers"].items():
                setattr(callback, name, value)
            if state["best_weights"]:
                callback.best_weights = [weight.numpy() for weight in state["best_weights"]]

    def finish(self, model: Any) -> None:
        """Do to the weights what callbacks do at a fit's end; nothing is left to train."""
        self.restore()
        for callback in self._callbacks.values():
            if isinstance(callback, keras.callbacks.EarlyStopping):
                callback.set_model(model)
                callback.on_train_end()
