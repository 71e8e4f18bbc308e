"""Adasum for ``tf.compat.v1`` optimizers.

Each rank applies its own gradients, and Adasum combines the weight deltas. Adasum (arXiv:2006.02924) combines descent
directions. The update that Adam or momentum computes from a rank's gradient is such a direction, but the update
computed from combined gradients is not; so the ranks combine deltas.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvd_cluster.monitor.step_clock import step_clock
from hvd_cluster.tensorflow.gradient_accumulation import accumulation_variable, operations
from hvd_cluster.tensorflow.gradients import GradientReducer, variable_key
from hvd_cluster.tensorflow.v1_wrapper import V1OptimizerWrapper


class DeltaOptimizer(V1OptimizerWrapper):
    """Applies a rank's own gradients, and combines the deltas by Adasum.

    The deltas are those of one or more steps. Works in eager mode, in a ``tf.function`` and in v1 graphs.

    Args:
        optimizer: the wrapped optimizer.
        name: the name of this optimizer.
        use_locking: as for ``tf.compat.v1.train.Optimizer``.
        reducer: combines the deltas; its op is Adasum.
        steps_per_combination: the number of local steps per combination. If it is more than one, a v1 graph keeps the
            start values in local variables, which ``tf.compat.v1.local_variables_initializer()`` initializes.
    """

    def __init__(
        self, optimizer: Any, name: str, use_locking: bool, reducer: GradientReducer, steps_per_combination: int
    ) -> None:
        super().__init__(optimizer, name, use_locking, reducer)
        self._steps_per_combination = steps_per_combination
        self._counter: Any = None
        #: The value of each variable before the first local step, by :func:`variable_key`.
        self._starts: dict[int, Any] = {}

    def compute_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """The (gradient, variable) pairs of the wrapped optimizer, of this rank only."""
        return self._optimizer.compute_gradients(*args, **kwargs)

    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: str | None = None) -> Any:
        """Apply this rank's step; the last local step combines all ranks' deltas.

        Raises:
            NotImplementedError: the number of ranks is not a power of two; or the job is elastic and the ranks
                take several local steps outside of a v1 graph.
            tf.errors.OpError: the ranks disagree, or the job has ended.
        """
        pairs = list(grads_and_vars)
        variables = [variable for gradient, variable in pairs if gradient is not None]
        starts, is_last = self._begin(variables)
        with tf.control_dependencies(operations(starts)):
            applied = self._optimizer.apply_gradients(pairs, global_step, name)
        with tf.control_dependencies(operations([applied])):
            if is_last is None:
                combined = self._combine(variables, starts)
            else:
                combined = tf.cond(is_last, lambda: self._combine(variables, starts), lambda: tf.constant(False))
        if tf.executing_eagerly():
            step_clock.end_step()
            return None
        return tf.group(combined)

    def _begin(self, variables: Sequence[Any]) -> tuple[list[tf.Tensor], Any]:
        """The variables' start values, and whether this step is combined.

        None stands for always.
        """
        if self._steps_per_combination == 1:
            # A copy: the optimizer may update a variable in place.
            return [tf.raw_ops.DeepCopy(x=variable.read_value()) for variable in variables], None
        with tf.init_scope():
            if self._counter is None:
                self._counter = accumulation_variable(tf.zeros((), tf.int32), "hvd_steps")
            for variable in variables:
                if variable_key(variable) not in self._starts:
                    zeros = tf.zeros(variable.shape, variable.dtype.base_dtype)
                    self._starts[variable_key(variable)] = accumulation_variable(zeros, "hvd_start")
        number = self._counter.assign_add(1, read_value=True)
        is_first = tf.equal(number % self._steps_per_combination, 1)
        starts = []
        for variable in variables:
            kept = self._starts[variable_key(variable)]
            starts.append(kept.assign(tf.where(is_first, variable.read_value(), kept), read_value=True))
        return [tf.identity(start) for start in starts], tf.equal(number % self._steps_per_combination, 0)

    def _combine(self, variables: Sequence[Any], starts: Sequence[tf.Tensor]) -> tf.Tensor:
        deltas = [variable.read_value() - start for variable, start in zip(variables, starts, strict=True)]
        combined = self._reducer(deltas, variables, "adasum")
        assigned = [
            variable.assign(start + delta) for variable, start, delta in zip(variables, starts, combined, strict=True)
        ]
        with tf.control_dependencies(operations(assigned)):
            return tf.constant(True)
