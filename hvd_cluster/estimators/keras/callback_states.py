"""How far Keras's own callbacks have come: what they wait for, and the best they have seen. Importing needs Keras."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

_KINDS = (keras.callbacks.EarlyStopping, keras.callbacks.ReduceLROnPlateau, keras.callbacks.ModelCheckpoint)
_NUMBERS = (
    "wait",
    "stopped_epoch",
    "best",
    "best_epoch",
    "cooldown_counter",
    # Of batches, for a file that is written every so many of them.
    "_last_batch_seen",
    "_batches_seen_since_last_saving",
)
_WEIGHTS = "best_weights"


class CallbackStates:
    """Taken into a run's checkpoints and put back, so that a resumed fit stops where an undisturbed one stops.

    Args:
        callbacks: the user's; those of other classes begin anew.
        body: the state in the run's checkpoint, ``.npz``; None where the run begins.
    """

    def __init__(self, callbacks: Sequence[Any], body: bytes | None) -> None:
        self._callbacks = {
            f"callback.{index}.": callback for index, callback in enumerate(callbacks) if isinstance(callback, _KINDS)
        }
        self._found: dict[str, Any] = {}
        if body is not None:
            with np.load(io.BytesIO(body)) as arrays:
                self._found = {name: arrays[name] for name in arrays if name.startswith("callback.")}

    def capture(self) -> dict[str, Any]:
        """Arrays by name, for the checkpoint."""
        arrays: dict[str, Any] = {}
        for prefix, callback in self._callbacks.items():
            numbers = {name: getattr(callback, name, None) for name in _NUMBERS}
            arrays |= {prefix + name: np.asarray(value) for name, value in numbers.items() if value is not None}
            for index, weight in enumerate(getattr(callback, _WEIGHTS, None) or []):
                value = np.asarray(weight)
                # NumPy's files do not know bfloat16.
                arrays[f"{prefix}{_WEIGHTS}.{index}"] = value.astype("f4") if value.dtype.name == "bfloat16" else value
        return arrays

    def restore(self) -> None:
        """Put them back; to be called once the callbacks have begun a training, for then they forget everything."""
        for prefix, callback in self._callbacks.items():
            for name in _NUMBERS:
                if prefix + name in self._found:
                    setattr(callback, name, self._found[prefix + name].item())
            names = [name for name in self._found if name.startswith(f"{prefix}{_WEIGHTS}.")]
            if names:
                setattr(callback, _WEIGHTS, [self._found[f"{prefix}{_WEIGHTS}.{index}"] for index in range(len(names))])

    def end(self, model: Any) -> None:
        """What the callbacks do to the weights at the end of a fit, for one that has nothing left to train."""
        self.restore()
        for callback in self._callbacks.values():
            if isinstance(callback, keras.callbacks.EarlyStopping):
                callback.set_model(model)
                callback.on_train_end()
