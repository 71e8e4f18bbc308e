"""Base class of the wrappers of ``tf.compat.v1`` optimizers."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvd_cluster.tensorflow.gradients import GradientReducer, variable_key

_V1Optimizer: Any = tf.compat.v1.train.Optimizer


class V1OptimizerWrapper(_V1Optimizer):  # type: ignore[misc,unused-ignore]
    """A v1 optimizer that forwards its state to a wrapped optimizer.

    Args:
        optimizer: the wrapped optimizer.
        name: the name of this optimizer.
        use_locking: as for ``tf.compat.v1.train.Optimizer``.
        reducer: reduces gradients over all ranks.
    """

    def __init__(self, optimizer: Any, name: str, use_locking: bool, reducer: GradientReducer) -> None:
        super().__init__(use_locking=use_locking, name=name)
        self._optimizer = optimizer
        self._reducer = reducer

    def register_local_var(self, var: Any) -> None:
        """Exclude a variable from the reduction.

        ``scale_local_gradients`` scales its gradient.
        """
        self._reducer.local_keys.add(variable_key(var))

    def _allreduce_grads(self, grads: Any, vars: Any) -> list[Any]:
        """The gradients of ``vars``, reduced over all ranks.

        For programs that override ``compute_gradients``.
        """
        reduced: list[Any] = self._reducer(list(grads), list(vars), "optimizer")
        return reduced

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        """A slot of the wrapped optimizer."""
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        """The slots of the wrapped optimizer."""
        return self._optimizer.get_slot_names(*args, **kwargs)

    def variables(self, *args: Any, **kwargs: Any) -> Any:
        """The variables of the wrapped optimizer."""
        return self._optimizer.variables(*args, **kwargs)
