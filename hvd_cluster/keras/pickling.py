"""Pickles and copies of a compiled model, and pickles of an optimizer, keep the distribution of the optimizer.

Keras pickles both as it saves them, and a saved model has the wrapped optimizer, so that it loads without this package.
But a pickle goes to a worker, or becomes a copy, where gradients are to be reduced as before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras

from hvd_cluster.engine.reduction_config import ReductionConfig


@dataclass(frozen=True)
class PickledDistribution:
    """How an optimizer is distributed. Variables are given by their positions in ``model.weights``."""

    config: ReductionConfig
    #: Whose gradients are not reduced.
    local: list[int]
    #: The backward passes of a step.
    steps: int
    average: bool

    @classmethod
    def of(
        cls, config: ReductionConfig, local: Sequence[Any], steps: int, average: bool, variables: Sequence[Any]
    ) -> PickledDistribution:
        """Find the positions in ``variables``.

        Raises:
            TypeError: ``variables`` lacks one.
        """
        positions = {id(variable): position for position, variable in enumerate(variables)}
        try:
            if isinstance(config.groups, (list, tuple)):
                config = replace(config, groups=[[positions[id(each)] for each in group] for group in config.groups])
            return cls(config, [positions[id(variable)] for variable in local], steps, average)
        except KeyError:
            raise TypeError(
                "a distributed optimizer with groups=[[...]] or local variables cannot be pickled alone: pickle the "
                "model that has these variables"
            ) from None

    def config_for(self, variables: Sequence[Any]) -> ReductionConfig:
        """The options, with groups of ``variables``."""
        groups = self.config.groups
        if not isinstance(groups, (list, tuple)):
            return self.config
        return replace(self.config, groups=[[variables[position] for position in group] for group in groups])


def patch_models(distribution_of: Callable[[Any], PickledDistribution | None], unpickled: Callable[..., Any]) -> None:
    """Pickle models whose optimizer is distributed with the distribution.

    Args:
        distribution_of: of a model; None if its optimizer is not distributed.
        unpickled: called with what makes the plain model, its arguments, and the distribution; returns the model.
    """
    reduce: Any = keras.Model.__reduce__
    if getattr(reduce, "asks_optimizer", False):
        return

    @functools.wraps(reduce)
    def reduced(model: Any) -> tuple[Any, ...]:
        make, arguments = reduce(model)
        distribution = distribution_of(model)
        return (make, arguments) if distribution is None else (unpickled, (make, arguments, distribution))

    reduced.asks_optimizer = True  # type: ignore[attr-defined]
    keras.Model.__reduce__ = reduced
