"""Metrics that are means over all ranks."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from hvd_cluster.keras.values import allreduce


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc,unused-ignore]
    """Replaces the metrics of an epoch by their means over all ranks; stands before callbacks that read them.

    Args:
        device: accepted, and without effect.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        del device

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Average, in the order of the names: all in one transfer."""
        if not logs:
            return
        names = sorted(logs)
        means = allreduce(np.array([float(logs[name]) for name in names]))
        logs.update(zip(names, means.tolist(), strict=True))
