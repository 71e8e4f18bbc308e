"""Batch normalisation over the batches of all ranks."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from hvd_cluster.engine.process_sets import global_process_set
from hvd_cluster.engine.request import Kind, ReduceOp
from hvd_cluster.engine.submission import Collective
from hvd_cluster.tensorflow.collectives.allreduce import reduced
from hvd_cluster.tensorflow.naming import label
from hvd_cluster.tensorflow.questions import is_alone


class SyncBatchNormalization(keras.layers.BatchNormalization):  # type: ignore[misc,unused-ignore]
    """``keras.layers.BatchNormalization`` whose mean and variance in training are those of all ranks' batches.

    Means and means of squares are averaged over the ranks, so each rank's batch counts alike, whatever its size.

    Args:
        fused: must be False.
        kwargs: as for ``keras.layers.BatchNormalization``.

    Raises:
        ValueError: ``fused`` is True or None.
    """

    def __init__(self, fused: bool | None = False, **kwargs: Any) -> None:
        if fused in (True, None):
            raise ValueError("SyncBatchNormalization does not support fused=True.")
        super().__init__(**kwargs)

    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        mean, variance = super()._moments(inputs, mask)
        if is_alone():
            return mean, variance
        # One request for both; the mean of squares, unlike the variance, is a mean over the ranks too.
        both = tf.stack([mean, variance + tf.square(mean)])
        average = Collective(
            kind=Kind.ALLREDUCE,
            process_set=global_process_set,
            name=None if tf.executing_eagerly() else label(f"sync_batch_norm.{self.name}", both),
            op=ReduceOp.AVERAGE,
        )
        (everyone,) = reduced([both], average)
        return everyone[0], everyone[1] - tf.square(everyone[0])
