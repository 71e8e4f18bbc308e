"""Distributed ``tf.compat.v1`` optimizers.

Keras optimizers are distributed in ``hvd_cluster.keras``.
"""

from __future__ import annotations

import importlib
from typing import Any

import tensorflow as tf

from hvd_cluster.elastic.keras_model import origin_of_optimizer
from hvd_cluster.engine.none_arguments import none_is_default
from hvd_cluster.engine.process_sets import ProcessSet, global_process_set
from hvd_cluster.engine.reduction_config import Groups, ReductionConfig
from hvd_cluster.engine.signature import ReduceOp
from hvd_cluster.monitor.step_clock import step_clock
from hvd_cluster.tensorflow.compression import Compression, Compressor
from hvd_cluster.tensorflow.delta_optimizer import DeltaOptimizer
from hvd_cluster.tensorflow.gradient_accumulation import GradientAccumulator
from hvd_cluster.tensorflow.gradients import GradientReducer
from hvd_cluster.tensorflow.timed_calls import time_calls_of_tensorflow
from hvd_cluster.tensorflow.v1_wrapper import V1OptimizerWrapper


@none_is_default
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
        name: the name of the new optimizer.
        use_locking: passed to v1 optimizers.
        device_dense: accepted and ignored.
        device_sparse: accepted and ignored.
        compression: how gradients are compressed for transfer.
        sparse_as_dense: convert ``tf.IndexedSlices`` to dense gradients first.
        backward_passes_per_step: backward passes whose gradients each rank accumulates before they are reduced and
            applied.
        op: Average or Sum; for ``tf.compat.v1`` optimizers also Adasum, which combines the weight deltas that each rank
            computes by itself.
        gradient_predivide_factor: divides an average by this before the sum and by the rest after it.
        average_aggregated_gradients: divide the accumulated gradients by the number of passes.
        num_groups: an older name for ``groups`` as a number.
        groups: the number of groups, or lists of variables whose gradients are reduced together. By default as few
            requests as possible.
        process_set: the ranks that take part; other ranks apply their own gradients.
        scale_local_gradients: divide the gradients of local variables by the number of ranks.

    Raises:
        ValueError: ``optimizer`` or ``op`` is not supported, or the options contradict each other.
        NotImplementedError: Adasum on a number of ranks that is not a power of two, or in a process set.
    """
    del device_dense, device_sparse
    op = ReduceOp(op)
    if op not in (ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.ADASUM):
        raise ValueError(f"op={op.name} is not supported by optimizers: use hvd.Average, hvd.Sum or hvd.Adasum")
    if op == ReduceOp.ADASUM and average_aggregated_gradients:
        raise ValueError(
            "average_aggregated_gradients=True cannot be combined with op=hvd.Adasum, which does not average gradients"
        )
    if backward_passes_per_step < 1:
        raise ValueError(f"backward_passes_per_step={backward_passes_per_step} must be >= 1")
    time_calls_of_tensorflow()
    if _is_keras_optimizer(optimizer):
        if op == ReduceOp.ADASUM:
            raise ValueError(
                "op=hvd.Adasum does not support Keras optimizers: use a tf.compat.v1.train one, or "
                "hvd.DistributedGradientTape(op=hvd.Adasum)"
            )
        # By its name: hvd_cluster.keras is a layer above, and registers nothing until a program imports it.
        wrap = importlib.import_module("hvd_cluster.keras").DistributedOptimizer
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
            f"{origin_of_optimizer(optimizer)}"
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
        aggregation = GradientAccumulator(
            backward_passes_per_step, average=average_aggregated_gradients, sparse_as_dense=sparse_as_dense
        )
    return _DistributedV1Optimizer(optimizer, name, use_locking, reducer, aggregation)


class _DistributedV1Optimizer(V1OptimizerWrapper):
    """Computes and applies with the wrapped optimizer, and reduces between the two."""

    def __init__(
        self,
        optimizer: Any,
        name: str,
        use_locking: bool,
        reducer: GradientReducer,
        aggregation: GradientAccumulator | None,
    ) -> None:
        super().__init__(optimizer, name, use_locking, reducer)
        self._aggregation = aggregation

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """The wrapped optimizer's (gradient, variable) pairs, with reduced gradients."""
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
        """Apply the gradients, unless the pass only accumulates.

        Such a pass increments ``global_step``.
        """
        pairs = list(grads_and_vars)
        if self._aggregation is None:
            return self._apply(pairs, global_step, name)
        if not tf.executing_eagerly():
            with tf.init_scope():  # slots must not be created inside a branch
                self._optimizer._create_slots([variable for gradient, variable in pairs if gradient is not None])
        return self._aggregation.apply(
            lambda: self._apply(pairs, global_step, name),
            lambda: None if global_step is None else global_step.assign_add(1),
        )

    def _apply(self, pairs: Any, global_step: Any, name: str | None) -> Any:
        if not tf.executing_eagerly():
            return self._optimizer.apply_gradients(pairs, global_step, name)
        with step_clock.update():
            self._optimizer.apply_gradients(pairs, global_step, name)
        return None


def _is_keras_optimizer(optimizer: Any) -> bool:
    import keras

    return isinstance(optimizer, keras.optimizers.Optimizer)
