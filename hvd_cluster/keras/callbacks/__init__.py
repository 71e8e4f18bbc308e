"""Callbacks for ``model.fit``, on any backend of Keras."""

from __future__ import annotations

from hvd_cluster.keras.callbacks.broadcast import BroadcastGlobalVariablesCallback
from hvd_cluster.keras.callbacks.checkpoint import BestModelCheckpoint
from hvd_cluster.keras.callbacks.learning_rate import LearningRateScheduleCallback, LearningRateWarmupCallback
from hvd_cluster.keras.callbacks.metrics import MetricAverageCallback

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]
