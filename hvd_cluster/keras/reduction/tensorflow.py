"""Gradients on Keras's TensorFlow backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvd_cluster.engine.signature import Kind
from hvd_cluster.engine.submission import Collective, Present
from hvd_cluster.keras.reduction.reducer import Reduction
from hvd_cluster.tensorflow.collectives.allreduce import reduced
from hvd_cluster.tensorflow.gradients import GradientReducer, variable_key
from hvd_cluster.tensorflow.naming import label


class TensorFlowReduction(Reduction):
    """Reduction by ``hvd_cluster.tensorflow``, as for its tape.

    It is one Python call, including sparse gradients.
    """

    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Reduce tensors and ``tf.IndexedSlices``."""
        local_keys = {variable_key(variable) for variable in self.local_variables.values()}
        reducer = GradientReducer(self.config, local_keys)
        return reducer(gradients, variables, "keras")

    @staticmethod
    def key(variable: Any) -> int:
        """The identity of a variable, equal for Keras's and TensorFlow's object."""
        return variable_key(variable)

    def reduce(
        self, tensors: Sequence[Any], groups: list[list[int]], held: Present | None = None, *, ends_step: bool = False
    ) -> list[Any]:
        """Reduce dense tensors without scaling."""
        name = None if tf.executing_eagerly() else label("keras", tensors[0])
        process_set, op = self.config.process_set, self.config.op
        collective = Collective(kind=Kind.ALLREDUCE, process_set=process_set, name=name, op=op, present=held)
        return reduced(tensors, collective, groups, ends_step=ends_step)

    @property
    def is_eager(self) -> bool:
        """Whether no function is traced."""
        return bool(tf.executing_eagerly())
