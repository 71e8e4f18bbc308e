"""Loss scaling for float16 in which either all ranks skip a step or none.

Keras halves the scale and skips the step if a gradient is not finite. Each rank would decide this by its own gradients
before the reduction, and ranks with different decisions would wait for gradients of different steps. So the ranks agree
on the decision first, by an allreduce of one number.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import keras

from hvd_cluster.keras.naming import subclass_saved_as

_LossScaleOptimizer: Any = keras.optimizers.LossScaleOptimizer


class DistributedLossScale(_LossScaleOptimizer):  # type: ignore[misc,unused-ignore]
    """Mixin for a LossScaleOptimizer whose inner optimizer is distributed.

    It comes in front of the class.
    """

    inner_optimizer: Any

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy whose inner optimizer is also distributed."""
        config = self.get_config()
        del config["inner_optimizer"]
        return type(self)(copy.deepcopy(self.inner_optimizer, memo), **config)

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickle with a distributed inner optimizer, without state, as Keras's is."""
        config = self.get_config()
        del config["inner_optimizer"]
        plain = next(kind for kind in type(self).__mro__ if not issubclass(kind, DistributedLossScale))
        return functools.partial(plain, **config), (self.inner_optimizer,)

    def check_finite(self, grads: Any) -> Any:
        """Whether the gradients of all ranks are finite."""
        return self.inner_optimizer.on_all_ranks(super().check_finite(grads))

    def register_local_var(self, var: Any) -> None:
        """Exclude a variable from the reduction.

        ``scale_local_gradients`` scales its gradient.
        """
        self.inner_optimizer.register_local_var(var)

    @property
    def variables(self) -> Any:
        """The variables of both optimizers, as a list that older programs may also call."""
        variables = self.inner_optimizer.variables
        return type(variables)([*self._variables, *variables])

    def save_own_variables(self, store: Any) -> None:
        """Save the same variables as Keras's own class."""
        with self.inner_optimizer.without_accumulators():
            super().save_own_variables(store)

    def load_own_variables(self, store: Any) -> None:
        """Load the variables that Keras's own class saves."""
        with self.inner_optimizer.without_accumulators():
            super().load_own_variables(store)


def distribute_loss_scale(inner: Any, scaling: Any, name: str | None) -> Any:
    """A LossScaleOptimizer with the state of another, around ``inner``.

    ``scaling`` is the other; ``inner`` is distributed.
    """
    wrapped = object.__new__(type(scaling))
    wrapped.__dict__.update(scaling.__dict__)
    wrapped.inner_optimizer = inner
    if name is not None:
        wrapped.name = name
    _distribute(wrapped)
    return wrapped


def patch_loss_scale_optimizer(distributed: type) -> None:
    """Distribute every new LossScaleOptimizer around a distributed optimizer.

    It becomes a :class:`DistributedLossScale`. ``model.compile`` creates one for models of mixed_float16 without asking
    the optimizer.
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
    """Put :class:`DistributedLossScale` in front of the class.

    The class keeps its name, because a saved model contains it.
    """
    kind = type(scaling)
    if not issubclass(kind, DistributedLossScale):
        scaling.__class__ = subclass_saved_as(kind, DistributedLossScale)
