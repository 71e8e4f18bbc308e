"""Metrics that are means over all ranks."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from hvd_cluster.keras.values import allreduce


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc,unused-ignore]
    """Replaces the metrics of an epoch by their means over all ranks; stands before callbacks that read them.

    A metric that is an array, as F1Score is with a value for each class, stays one; the others become floats.

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
        own = [np.asarray(keras.ops.convert_to_numpy(logs[name]), np.float64) for name in names]
        means = allreduce(np.concatenate([each.ravel() for each in own]))
        ends = np.cumsum([each.size for each in own])[:-1]
        for name, each, mean in zip(names, own, np.split(means, ends), strict=True):
            logs[name] = mean.reshape(each.shape) if each.ndim else float(mean[0])
