"""Loss scaling for float16 in which all ranks skip a step, or none does.

Keras halves the scale and skips the step where a gradient is not finite. Each rank decides that by its own gradients,
before they are reduced: ranks that decide apart would wait for each other's gradients of different steps. So the ranks
agree on it first, by one number.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import keras

from hvd_cluster.keras.naming import subclass_saved_as

_LossScaleOptimizer: Any = keras.optimizers.LossScaleOptimizer


class DistributedLossScale(_LossScaleOptimizer):  # type: ignore[misc,unused-ignore]
    """What is put in front of a LossScaleOptimizer's class where the optimizer in it is distributed."""

    inner_optimizer: Any

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy whose inner optimizer is distributed too."""
        config = self.get_config()
        del config["inner_optimizer"]
        return type(self)(copy.deepcopy(self.inner_optimizer, memo), **config)

    def check_finite(self, grads: Any) -> Any:
        """Whether the gradients of all ranks are finite."""
        return self.inner_optimizer.on_all_ranks(super().check_finite(grads))

    def register_local_var(self, var: Any) -> None:
        """Leave the gradient of a variable to each rank; it is divided by the number of ranks if so asked."""
        self.inner_optimizer.register_local_var(var)

    @property
    def variables(self) -> Any:
        """The variables of both optimizers, as a list that may be called like a function, as older programs do."""
        variables = self.inner_optimizer.variables
        return type(variables)([*self._variables, *variables])

    def save_own_variables(self, store: Any) -> None:
        """Save what Keras's own would."""
        with self.inner_optimizer.sums_hidden():
            super().save_own_variables(store)

    def load_own_variables(self, store: Any) -> None:
        """Load what Keras's own has saved."""
        with self.inner_optimizer.sums_hidden():
            super().load_own_variables(store)


def around(inner: Any, scaling: Any, name: str | None) -> Any:
    """A LossScaleOptimizer like ``scaling``, with its state, around the distributed ``inner``."""
    wrapped = object.__new__(type(scaling))
    wrapped.__dict__.update(scaling.__dict__)
    wrapped.inner_optimizer = inner
    if name is not None:
        wrapped.name = name
    _distribute(wrapped)
    return wrapped


def agree_where_distributed(distributed: type) -> None:
    """Have every LossScaleOptimizer that is made around a ``distributed`` optimizer be a :class:`DistributedLossScale`.

    ``model.compile`` makes one by itself for models of mixed_float16, and asks the optimizer nothing.
    """
    initialise = _LossScaleOptimizer.__init__
    if getattr(initialise, "asks_optimizer", False):
        return

    @functools.wraps(initialise)
    def initialised(self: Any, inner_optimizer: Any, *args: Any, **kwargs: Any) -> None:
        initialise(self, inner_optimizer, *args, **kwargs)
        if isinstance(inner_optimizer, distributed):
            _distribute(self)

    initialised.asks_optimizer = True  # type: ignore[attr-defined]
    _LossScaleOptimizer.__init__ = initialised


def _distribute(scaling: Any) -> None:
    """Put :class:`DistributedLossScale` in front of the class, whose name stays: a saved model names it."""
    kind = type(scaling)
    if not issubclass(kind, DistributedLossScale):
        scaling.__class__ = subclass_saved_as(kind, DistributedLossScale)
