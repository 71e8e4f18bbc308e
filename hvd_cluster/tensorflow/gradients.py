"""The gradients of one step, reduced over all ranks in one crossing into Python: what tape and optimizers share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from hvd_cluster.engine.basics import is_alone
from hvd_cluster.engine.parts import grouped
from hvd_cluster.engine.process_sets import ProcessSet, global_process_set
from hvd_cluster.engine.request import Kind, ReduceOp
from hvd_cluster.engine.submission import Collective, takes_part
from hvd_cluster.tensorflow.collectives.allreduce import check_adasum, reduced, sparse_sum
from hvd_cluster.tensorflow.compression import Compression, Compressor
from hvd_cluster.tensorflow.naming import label
from hvd_cluster.tensorflow.questions import num_members_op

Groups = int | Sequence[Sequence[Any]] | None


@dataclass(frozen=True, kw_only=True)
class GradientReducer:
    """How gradients become those of all ranks.

    Raises:
        ValueError: the options contradict each other.
    """

    #: Average, Sum, or Adasum; Min, Max and Product are reduced as they are.
    op: ReduceOp = ReduceOp.AVERAGE
    compression: type[Compressor] = Compression.none
    #: Turn ``tf.IndexedSlices`` into dense gradients first.
    sparse_as_dense: bool = False
    #: Divide an average by so much before the sum, and by the rest after it.
    predivide_factor: float = 1.0
    #: How many groups, or which variables' gradients are reduced together; None for as it fits.
    groups: Groups = None
    process_set: ProcessSet = global_process_set
    #: Divide the gradients of local variables by the number of ranks, as if the others had had none.
    scale_local_gradients: bool = True
    #: What :func:`variable_key` gives for each variable that is not reduced; it grows.
    local_keys: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        if self.predivide_factor != 1.0 and self.op != ReduceOp.AVERAGE:
            raise ValueError("gradient_predivide_factor not supported with op != Average")
        if self.predivide_factor == 0.0:
            raise ValueError("gradient_predivide_factor=0 must be another number: gradients are divided by it")
        resolve_groups(self.groups, [None])

    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any], name: str = "gradients") -> list[Any]:
        """Reduce.

        Args:
            gradients: a tensor, ``tf.IndexedSlices`` or None for each variable.
            variables: what they belong to.
            name: what this step is called in a graph.

        Returns:
            The reduced gradients, in the same order; None stays None. Outside of the process set the given ones.
        """
        results = list(gradients)
        if is_alone() or not takes_part(self.process_set):
            return results
        is_local = [variable_key(variable) in self.local_keys for variable in variables]
        if self.scale_local_gradients and any(is_local):
            number = num_members_op(self.process_set)
            for index, gradient in enumerate(results):
                if is_local[index] and gradient is not None:
                    results[index] = _divided(gradient, number)
        shared = [i for i, gradient in enumerate(results) if gradient is not None and not is_local[i]]
        if self.sparse_as_dense:
            for i in shared:
                results[i] = tf.convert_to_tensor(results[i])
        if self.op == ReduceOp.ADASUM:
            check_adasum([results[i] for i in shared], self.process_set)
        full = [i for i in shared if not isinstance(results[i], tf.IndexedSlices)]
        sparse = [i for i in shared if isinstance(results[i], tf.IndexedSlices)]
        for indices, values in (
            (full, self._dense([results[i] for i in full], [variables[i] for i in full], name)),
            (sparse, self._sparse([results[i] for i in sparse], name)),
        ):
            for index, value in zip(indices, values, strict=True):
                results[index] = value
        return results

    def _dense(self, gradients: list[tf.Tensor], variables: list[Any], name: str) -> list[tf.Tensor]:
        if not gradients:
            return []
        compressed, contexts = zip(*(self.compression.compress(gradient) for gradient in gradients), strict=True)
        collective = Collective(
            kind=Kind.ALLREDUCE,
            process_set=self.process_set,
            name=None if tf.executing_eagerly() else label(name, compressed[0]),
            op=self.op,
            prescale=1.0 / self.predivide_factor,
            postscale=self.predivide_factor,
        )
        sums = reduced(compressed, collective, resolve_groups(self.groups, variables))
        return [self.compression.decompress(each, context) for each, context in zip(sums, contexts, strict=True)]

    def _sparse(self, gradients: list[tf.IndexedSlices], name: str) -> list[tf.IndexedSlices]:
        if not gradients:
            return []
        if self.op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
            raise NotImplementedError(f"op={self.op.name} of tf.IndexedSlices: use sparse_as_dense=True")
        its_label = None if tf.executing_eagerly() else label(f"{name}.sparse", gradients[0].values)
        average = self.op == ReduceOp.AVERAGE
        return sparse_sum(gradients, self.process_set, its_label, average=average, compression=self.compression)


def resolve_groups(groups: Groups, variables: Sequence[Any]) -> list[list[int]]:
    """The groups as lists of indices into ``variables``; what is in no group is reduced as it fits."""
    if isinstance(groups, (list, tuple)):
        groups = [[variable_key(v) for v in group] if isinstance(group, (list, tuple)) else group for group in groups]
    return grouped(groups, [variable_key(variable) for variable in variables])


def variable_key(variable: Any) -> int:
    """The identity of a variable; Keras's and TensorFlow's object for one variable have the same."""
    inner = getattr(variable, "value", None)
    return id(variable if inner is None or callable(inner) else inner)


def variables_of_layers(layers: Any, argument: str = "local_layers") -> list[Any]:
    """The trainable variables of a layer or a list of layers.

    Raises:
        ValueError: something else was given.
    """
    import keras

    given = [] if layers is None else list(layers) if isinstance(layers, (list, tuple)) else [layers]
    wrong = [layer for layer in given if not isinstance(layer, keras.layers.Layer)]
    if wrong:
        raise ValueError(f"{argument} takes Keras layers, and was given {type(wrong[0]).__name__}")
    return [variable for layer in given for variable in layer.trainable_variables]


def _divided(gradient: Any, number: tf.Tensor) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values / tf.cast(number, gradient.values.dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient / tf.cast(number, gradient.dtype)
