"""Batch normalization over the batches of all ranks."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from hvd_cluster.engine.basics import is_alone
from hvd_cluster.engine.process_sets import global_process_set
from hvd_cluster.engine.signature import Kind, ReduceOp
from hvd_cluster.engine.submission import Collective
from hvd_cluster.tensorflow.collectives.allreduce import reduced
from hvd_cluster.tensorflow.naming import unscoped_label


class SyncBatchNormalization(keras.layers.BatchNormalization):  # type: ignore[misc,unused-ignore]
    """Batch normalization with statistics over the batches of all ranks.

    A ``keras.layers.BatchNormalization``; the statistics are those of training. The ranks average the means, then the
    squared deviations from the global mean, so each rank has the same weight whatever its batch size. Ranks match the
    layers of a step by their order. XLA cannot compile the layer.

    Where this module is imported, Keras finds the layer of a saved model by its name, without ``custom_objects``.

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
        self.supports_jit = False  # so that jit_compile="auto" does not compile the model

    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        mean, variance = super()._moments(inputs, mask)
        if is_alone():
            return mean, variance
        global_mean = _average(mean, "mean")
        # Two passes: E[x^2] - E[x]^2 would cancel where the mean is large.
        return global_mean, _average(variance + tf.square(mean - global_mean), "variance")


# Under its bare name: where this package is not installed, a saved model is loaded with a class of that name.
keras.saving.get_custom_objects()[SyncBatchNormalization.__name__] = SyncBatchNormalization


def _average(tensor: tf.Tensor, name: str) -> tf.Tensor:
    average = Collective(
        kind=Kind.ALLREDUCE,
        process_set=global_process_set,
        name=unscoped_label(f"sync_batch_norm.{name}"),
        op=ReduceOp.AVERAGE,
    )
    (global_mean,) = reduced([tensor], average)
    return global_mean
