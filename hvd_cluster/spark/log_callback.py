"""A Keras callback that reports the training's progress to the notebook's cell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from hvd_cluster.spark.driver_log import log_to_driver


class LogCallback(keras.callbacks.Callback):
    """Sends the metrics of each epoch to the driver.

    It calls :func:`~hvd_cluster.spark.driver_log.log_to_driver`.

    Args:
        per_batch_log: also send the metrics of each batch.
    """

    def __init__(self, per_batch_log: bool = False) -> None:
        super().__init__()
        self.per_batch_log = per_batch_log

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Send the metrics of the epoch."""
        log_to_driver(f"epoch {epoch + 1}: {_formatted(logs)}")

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Send the metrics of the batch, if wanted."""
        if self.per_batch_log:
            log_to_driver(f"batch {batch + 1}: {_formatted(logs)}")


def _formatted(logs: Mapping[str, Any] | None) -> str:
    return ", ".join(f"{name} {_text_of(value)}" for name, value in (logs or {}).items())


def _text_of(value: Any) -> str:
    """A metric as text: a number, or a list of the numbers of its classes."""
    try:
        array = keras.ops.convert_to_numpy(value)
        numbers = [f"{float(number):.4g}" for number in array.reshape(-1)]
    except (TypeError, ValueError, RuntimeError):  # what a callback of the user's own has put there
        return str(value)
    return numbers[0] if array.size == 1 else f"[{', '.join(numbers)}]"
