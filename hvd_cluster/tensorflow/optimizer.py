"""Optimizers whose gradients are those of all ranks: ``tf.compat.v1`` ones here, Keras's in ``hvd_cluster.keras``."""

from __future__ import annotations

import importlib
from typing import Any

import tensorflow as tf

from hvd_cluster.engine.process_sets import ProcessSet, global_process_set
from hvd_cluster.engine.reduction_config import Groups, ReductionConfig
from hvd_cluster.engine.request import ReduceOp
from hvd_cluster.tensorflow.aggregation import LocalAggregation
from hvd_cluster.tensorflow.compression import Compression, Compressor
from hvd_cluster.tensorflow.delta_optimizer import DeltaOptimizer
from hvd_cluster.tensorflow.gradients import GradientReducer
from hvd_cluster.tensorflow.wrapping import WrappingOptimizer


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: ReduceOp = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """An optimizer like ``optimizer`` that applies gradients reduced over all ranks.

    Args:
        optimizer: a ``tf.compat.v1.train.Optimizer``, or a Keras optimizer, whose state is kept.
        name: of the new optimizer.
        use_locking: passed on to v1 optimizers.
        device_dense: accepted, and without effect.
        device_sparse: accepted, and without effect.
        compression: how gradients travel.
        sparse_as_dense: turn ``tf.IndexedSlices`` into dense gradients first.
        backward_passes_per_step: passes whose gradients are summed on each rank before they are reduced and applied.
        op: Average or Sum; for ``tf.compat.v1`` optimizers Adasum too, which combines the changes that every rank makes
            of its weights alone.
        gradient_predivide_factor: divides an average by this before the sum and by the rest after it.
        average_aggregated_gradients: divide those sums by the number of passes.
        num_groups: the older name of a number as ``groups``.
        groups: how many groups, or which variables' gradients are reduced together. Without it, as few requests as fit.
        process_set: whose ranks take part; the others step with their own gradients.
        scale_local_gradients: divide the gradients of local variables by the number of ranks.

    Raises:
        ValueError: ``optimizer`` is none, ``op`` is none of these, or the options contradict each other.
        NotImplementedError: Adasum on a number of ranks that is not a power of two, or in a process set.
    """
    del device_dense, device_sparse
    op = ReduceOp(op)
    if op not in (ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.ADASUM):
        raise ValueError(f"op={op.name} is not supported by optimizers: use hvd.Average, hvd.Sum or hvd.Adasum")
    if op == ReduceOp.ADASUM and average_aggregated_gradients:
        raise ValueError("Adasum does not average gradients: average_aggregated_gradients=True has no meaning with it")
    if backward_passes_per_step < 1:
        raise ValueError(f"backward_passes_per_step={backward_passes_per_step} must be >= 1")
    if _is_keras_optimizer(optimizer):
        if op == ReduceOp.ADASUM:
            raise ValueError(
                "op=hvd.Adasum does not support Keras optimizers: use a tf.compat.v1.train one, or "
                "hvd.DistributedGradientTape(op=hvd.Adasum)"
            )
        # Keras stands above TensorFlow in this package: found where users find it.
        wrap = importlib.import_module("hvd_cluster.tensorflow.keras").DistributedOptimizer
        return wrap(
            optimizer,
            name=name,
            compression=compression,
            sparse_as_dense=sparse_as_dense,
            gradient_predivide_factor=gradient_predivide_factor,
            op=op,
            backward_passes_per_step=backward_passes_per_step,
            average_aggregated_gradients=average_aggregated_gradients,
            groups=groups if groups is not None else num_groups,
            process_set=process_set,
            scale_local_gradients=scale_local_gradients,
        )
    if not isinstance(optimizer, tf.compat.v1.train.Optimizer):
        raise ValueError(
            "Provided optimizer doesn't inherit from either legacy TensorFlow or Keras optimizer: "
            f"{type(optimizer).__name__}"
        )
    reducer = GradientReducer(
        ReductionConfig(
            op=op,
            compression=compression,
            sparse_as_dense=sparse_as_dense,
            predivide_factor=gradient_predivide_factor,
            groups=groups if groups is not None else num_groups,
            process_set=process_set,
            scale_local_gradients=scale_local_gradients,
        )
    )
    name = name or f"Distributed{type(optimizer).__name__}"
    if op == ReduceOp.ADASUM:
        return DeltaOptimizer(optimizer, name, use_locking, reducer, backward_passes_per_step)
    aggregation = None
    if backward_passes_per_step > 1:
        aggregation = LocalAggregation(
            backward_passes_per_step, average=average_aggregated_gradients, sparse_as_dense=sparse_as_dense
        )
    return _DistributedV1Optimizer(optimizer, name, use_locking, reducer, aggregation)


class _DistributedV1Optimizer(WrappingOptimizer):
    """Computes with the wrapped optimizer, reduces, applies with the wrapped optimizer."""

    def __init__(
        self,
        optimizer: Any,
        name: str,
        use_locking: bool,
        reducer: GradientReducer,
        aggregation: LocalAggregation | None,
    ) -> None:
        super().__init__(optimizer, name, use_locking, reducer)
        self._aggregation = aggregation

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """The (gradient, variable) pairs of the wrapped optimizer, with reduced gradients."""
        pairs = self._optimizer.compute_gradients(*args, **kwargs)
        gradients, variables = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        if self._aggregation is None:
            reduced = self._reducer(gradients, variables, "optimizer")
        else:
            reduced = self._aggregation.aggregate(
                gradients, variables, lambda sums: self._reducer(sums, variables, "optimizer")
            )
        return list(zip(reduced, variables, strict=True))

    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: str | None = None) -> Any:
        """Apply; in a pass that completes no step only ``global_step`` is incremented."""
        pairs = list(grads_and_vars)
        if self._aggregation is None:
            return self._optimizer.apply_gradients(pairs, global_step, name)
        if not tf.executing_eagerly():
            with tf.init_scope():  # slots must not belong to one branch
                self._optimizer._create_slots([variable for gradient, variable in pairs if gradient is not None])
        return self._aggregation.apply(
            lambda: self._optimizer.apply_gradients(pairs, global_step, name),
            lambda: None if global_step is None else global_step.assign_add(1),
        )


def _is_keras_optimizer(optimizer: Any) -> bool:
    import keras

    return isinstance(optimizer, keras.optimizers.Optimizer)
