"""Metrics averaged over all ranks."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from hvd_cluster.keras.values import allreduce
from hvd_cluster.torch import allgather_object


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc,unused-ignore]
    """Replaces the metrics of an epoch by their means over all ranks.

    List it before callbacks that read them. Array metrics, such as F1Score with one value per class, stay arrays; other
    metrics become floats.

    Args:
        device: accepted and ignored.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        del device

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Average all metrics in one transfer, in the order of their names.

        Raises:
            ValueError: the ranks have different metrics; raised on all ranks.
        """
        names = sorted(logs or ())
        _check_same_names(epoch, allgather_object(names))
        if not logs:
            return
        own = [np.asarray(keras.ops.convert_to_numpy(logs[name]), np.float64) for name in names]
        means = allreduce(np.concatenate([each.ravel() for each in own]))
        ends = np.cumsum([each.size for each in own])[:-1]
        for name, each, mean in zip(names, own, np.split(means, ends), strict=True):
            logs[name] = mean.reshape(each.shape) if each.ndim else float(mean[0])


def _check_same_names(epoch: int, names: list[list[str]]) -> None:
    """Raise if the metrics of the ranks have different names.

    Values of different metrics would be averaged.
    """
    others = [rank for rank, each in enumerate(names) if each != names[0]]
    if others:
        raise ValueError(
            f"after epoch {epoch} rank 0 has the metrics {names[0]} and rank {others[0]} has {names[others[0]]}, but "
            "MetricAverageCallback requires the same metrics on all ranks: pass validation data and metrics to "
            "model.fit() on every rank or on none, and list callbacks that add metrics on some ranks after "
            "MetricAverageCallback"
        )
