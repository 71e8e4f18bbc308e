"""Reduction of the gradients of one step, in one call of Python, for tapes and optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from hvd_cluster.engine.basics import is_alone
from hvd_cluster.engine.membership import takes_part
from hvd_cluster.engine.reduction_config import ReductionConfig
from hvd_cluster.engine.request import Kind, ReduceOp
from hvd_cluster.engine.submission import Collective
from hvd_cluster.tensorflow.collectives.allreduce import check_adasum, reduced, sparse_sum
from hvd_cluster.tensorflow.naming import label
from hvd_cluster.tensorflow.rank_ops import num_members_op


@dataclass(frozen=True)
class GradientReducer:
    """Reduces gradients over all ranks.

    Min, Max and Product are applied to the gradients without scaling.
    """

    config: ReductionConfig
    #: The :func:`variable_key` of each variable that is not reduced; grows.
    local_keys: set[int] = field(default_factory=set)

    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any], name: str = "gradients") -> list[Any]:
        """Reduce.

        Args:
            gradients: a tensor, ``tf.IndexedSlices`` or None for each variable.
            variables: those of the gradients.
            name: the name of this step in a graph.

        Returns:
            The reduced gradients in the same order; None stays None. Outside the process set, the given gradients.
        """
        config = self.config
        results = list(gradients)
        if is_alone() or not takes_part(config.process_set):
            return results
        is_local = [variable_key(variable) in self.local_keys for variable in variables]
        if config.scale_local_gradients and any(is_local):
            number = num_members_op(config.process_set)
            for index, gradient in enumerate(results):
                if is_local[index] and gradient is not None:
                    results[index] = _divided(gradient, number)
        shared = [i for i, gradient in enumerate(results) if gradient is not None and not is_local[i]]
        if config.sparse_as_dense:
            for i in shared:
                results[i] = tf.convert_to_tensor(results[i])
        if config.op == ReduceOp.ADASUM:
            check_adasum([results[i] for i in shared], config.process_set)
        full = [i for i in shared if not isinstance(results[i], tf.IndexedSlices)]
        sparse = [i for i in shared if isinstance(results[i], tf.IndexedSlices)]
        for indices, values in (
            (full, self._dense([results[i] for i in full], [variables[i] for i in full], name, ends_step=not sparse)),
            (sparse, self._sparse([results[i] for i in sparse], name)),
        ):
            for index, value in zip(indices, values, strict=True):
                results[index] = value
        return results

    def _dense(
        self, gradients: list[tf.Tensor], variables: list[Any], name: str, *, ends_step: bool
    ) -> list[tf.Tensor]:
        if not gradients:
            return []
        config = self.config
        compressed, contexts = zip(*(config.compression.compress(gradient) for gradient in gradients), strict=True)
        collective = Collective(
            kind=Kind.ALLREDUCE,
            process_set=config.process_set,
            name=None if tf.executing_eagerly() else label(name, compressed[0]),
            op=config.op,
            prescale=1.0 / config.predivide_factor,
            postscale=config.predivide_factor,
        )
        sums = reduced(compressed, collective, config.group_indices(variables, variable_key), ends_step=ends_step)
        return [config.compression.decompress(each, context) for each, context in zip(sums, contexts, strict=True)]

    def _sparse(self, gradients: list[tf.IndexedSlices], name: str) -> list[tf.IndexedSlices]:
        if not gradients:
            return []
        config = self.config
        if config.op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
            raise NotImplementedError(f"op={config.op.name} of tf.IndexedSlices: use sparse_as_dense=True")
        request_name = None if tf.executing_eagerly() else label(f"{name}.sparse", gradients[0].values)
        average = config.op == ReduceOp.AVERAGE
        return sparse_sum(
            gradients,
            config.process_set,
            request_name,
            average=average,
            compression=config.compression,
            ends_step=True,
        )


def variable_key(variable: Any) -> int:
    """The identity of a variable; equal for Keras's and TensorFlow's object of one variable."""
    inner = getattr(variable, "value", None)
    return id(variable if inner is None or callable(inner) else inner)


def _divided(gradient: Any, number: tf.Tensor) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values / tf.cast(number, gradient.values.dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient / tf.cast(number, gradient.dtype)
