"""Reduction of a step's gradients in one call of Python.

Tapes and optimizers use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from hvd_cluster.engine.basics import is_alone
from hvd_cluster.engine.gradient_presence import Presence, agree, dense_ones
from hvd_cluster.engine.membership import takes_part
from hvd_cluster.engine.reduction_config import ReductionConfig
from hvd_cluster.engine.signature import Kind, ReduceOp
from hvd_cluster.engine.submission import Collective, Present
from hvd_cluster.errors import RanksDisagreeError
from hvd_cluster.tensorflow.collectives.allreduce import check_adasum, reduced, sparse_sum
from hvd_cluster.tensorflow.errors import as_tensorflow_errors
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
            The reduced gradients in the same order; None where no rank has one, or in a graph where this rank has none.
            Outside the process set, the given gradients.
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
        indices = [index for index, local in enumerate(is_local) if not local]
        own, shared = [results[index] for index in indices], [variables[index] for index in indices]
        for index, gradient in zip(indices, self._shared(own, shared, name), strict=True):
            results[index] = gradient
        return results

    def _shared(self, gradients: list[Any], variables: Sequence[Any], name: str) -> list[Any]:
        """Reduce the gradients of shared variables; None where no rank has one."""
        config = self.config
        if config.sparse_as_dense:
            gradients = [None if gradient is None else tf.convert_to_tensor(gradient) for gradient in gradients]
        given = [gradient for gradient in gradients if gradient is not None]
        if config.op == ReduceOp.ADASUM:
            check_adasum(given, config.process_set)
        if not tf.executing_eagerly() and not given:
            return gradients
        presences = [_presence(gradient) for gradient in gradients]
        try:
            return self._reduced(gradients, variables, presences, name)
        except RanksDisagreeError:
            agreed = agree(presences, config.process_set) if tf.executing_eagerly() else None
            if agreed is None:
                raise
            whole = [_given(*each) for each in zip(gradients, variables, agreed, strict=True)]
            return self._reduced(whole, variables, agreed, name)

    def _reduced(
        self, gradients: Sequence[Any], variables: Sequence[Any], presences: Sequence[Presence | None], name: str
    ) -> list[Any]:
        results = list(gradients)
        num_bytes = [4 * (tf.TensorShape(variable.shape).num_elements() or 0) for variable in variables]
        dense = dense_ones(presences, num_bytes)
        sparse = [index for index, each in enumerate(presences) if each is not None and each.is_sparse]
        groups = self.config.group_indices(variables, variable_key)
        # The dense ones first, and eagerly also if there is none: this shows whether the ranks have different ones.
        full = self._dense([results[i] for i in dense.indices], groups, dense, name, ends_step=not sparse)
        for indices, values in (
            (dense.indices, full),
            (sparse, self._sparse([results[i] for i in sparse], [variables[i] for i in sparse], name)),
        ):
            for index, value in zip(indices, values, strict=True):
                results[index] = value
        return results

    def _dense(
        self, gradients: list[tf.Tensor], groups: list[list[int]], held: Present, name: str, *, ends_step: bool
    ) -> list[tf.Tensor]:
        config, is_eager = self.config, tf.executing_eagerly()
        if not gradients and not is_eager:
            return []
        pairs = [config.compression.compress(gradient) for gradient in gradients]
        compressed = [gradient for gradient, _ in pairs]
        collective = Collective(
            kind=Kind.ALLREDUCE,
            process_set=config.process_set,
            name=None if is_eager else label(name, compressed[0]),
            op=config.op,
            prescale=1.0 / config.predivide_factor,
            postscale=config.predivide_factor,
            present=held,
        )
        if not gradients:
            with as_tensorflow_errors():
                collective.begin_parts([], groups=groups).wait()
            return []
        sums = reduced(compressed, collective, groups, ends_step=ends_step)
        return [config.compression.decompress(each, context) for each, (_, context) in zip(sums, pairs, strict=True)]

    def _sparse(self, gradients: list[tf.IndexedSlices], variables: Sequence[Any], name: str) -> list[tf.IndexedSlices]:
        if not gradients:
            return []
        config = self.config
        if config.op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
            raise NotImplementedError(f"op={config.op.name} of tf.IndexedSlices: use sparse_as_dense=True")
        request_name = None if tf.executing_eagerly() else label(f"{name}.sparse", gradients[0].values)
        shapes = [tf.TensorShape(variable.shape) for variable in variables]
        return sparse_sum(
            gradients,
            shapes,
            config.op,
            config.process_set,
            request_name,
            compression=config.compression,
            ends_step=True,
        )


def _presence(gradient: Any) -> Presence | None:
    if isinstance(gradient, tf.IndexedSlices):
        return Presence(is_sparse=True, dtype=gradient.dtype.name, index_dtype=gradient.indices.dtype.name)
    return None if gradient is None else Presence(is_sparse=False, dtype=gradient.dtype.name)


def _given(gradient: Any, variable: Any, presence: Presence | None) -> Any:
    """The gradient in the form that the ranks have agreed on.

    It is zeros if this rank has none.
    """
    if presence is None:
        return None
    if gradient is not None:
        return gradient if presence.is_sparse else tf.convert_to_tensor(gradient)
    shape = variable.shape.as_list()
    if not presence.is_sparse:
        return tf.zeros(shape, presence.dtype)
    rows, indices = tf.zeros([0, *shape[1:]], presence.dtype), tf.zeros([0], presence.index_dtype)
    return tf.IndexedSlices(rows, indices, tf.constant(shape, presence.index_dtype))


def variable_key(variable: Any) -> int:
    """Identify a variable.

    Keras's and TensorFlow's objects of one variable have the same key.
    """
    inner = getattr(variable, "value", None)
    return id(variable if inner is None or callable(inner) else inner)


def _divided(gradient: Any, number: tf.Tensor) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values / tf.cast(number, gradient.values.dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient / tf.cast(number, gradient.dtype)
