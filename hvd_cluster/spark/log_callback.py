"""A Keras callback that says in the notebook's cell how the training goes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from hvd_cluster.spark.driver_log import log_to_driver


class LogCallback(keras.callbacks.Callback):
    """Sends the metrics of each epoch to the driver, through :func:`~hvd_cluster.spark.driver_log.log_to_driver`.

    Args:
        per_batch_log: those of each batch too.
    """

    def __init__(self, per_batch_log: bool = False) -> None:
        super().__init__()
        self.per_batch_log = per_batch_log

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Say how the epoch went."""
        log_to_driver(f"epoch {epoch + 1}: {_told(logs)}")

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Say how the batch went, if that is wanted."""
        if self.per_batch_log:
            log_to_driver(f"batch {batch + 1}: {_told(logs)}")


def _told(logs: Mapping[str, Any] | None) -> str:
    return ", ".join(f"{name} {float(value):.4g}" for name, value in (logs or {}).items())
