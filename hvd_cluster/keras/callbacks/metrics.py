"""Metrics that are means over all ranks."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from hvd_cluster.keras.values import allreduce
from hvd_cluster.torch import allgather_object


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
        """Average, in the order of the names: all in one transfer.

        Raises:
            ValueError: the ranks have not the same metrics; on all of them.
        """
        names = sorted(logs or ())
        _refuse_others(epoch, allgather_object(names))
        if not logs:
            return
        own = [np.asarray(keras.ops.convert_to_numpy(logs[name]), np.float64) for name in names]
        means = allreduce(np.concatenate([each.ravel() for each in own]))
        ends = np.cumsum([each.size for each in own])[:-1]
        for name, each, mean in zip(names, own, np.split(means, ends), strict=True):
            logs[name] = mean.reshape(each.shape) if each.ndim else float(mean[0])


def _refuse_others(epoch: int, names: list[list[str]]) -> None:
    """Raise where the names of the metrics, by rank, are not the same: values would meet under different names."""
    others = [rank for rank, each in enumerate(names) if each != names[0]]
    if others:
        raise ValueError(
            f"after epoch {epoch} rank 0 has the metrics {names[0]} and rank {others[0]} has {names[others[0]]}, and "
            "MetricAverageCallback averages what all ranks have: give model.fit() validation data and metrics on every "
            "rank or on none, and put callbacks that add metrics on some ranks behind MetricAverageCallback"
        )
