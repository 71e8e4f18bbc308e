"""A Keras callback that reports the training's progress to the notebook's cell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from hvd_cluster.spark.driver_log import log_to_driver


class LogCallback(keras.callbacks.Callback):
    """Sends the metrics of each epoch to the driver with :func:`~hvd_cluster.spark.driver_log.log_to_driver`.

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
    return ", ".join(f"{name} {float(value):.4g}" for name, value in (logs or {}).items())
