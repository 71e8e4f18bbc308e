"""Pickles and copies of models and optimizers keep the distribution.

The models are compiled ones; optimizers are only pickled. Keras pickles and copies a model as it saves it. A saved
model has the wrapped optimizer, so that it loads without this package; but a pickle goes to a worker, or becomes a
copy, where gradients are to be reduced as before.
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
    """How an optimizer is distributed, with variables as positions.

    The positions are those in ``model.weights``.
    """

    config: ReductionConfig
    #: Whose gradients are not reduced.
    local: list[int]
    #: The backward passes of a step.
    steps: int
    average: bool

    def __deepcopy__(self, memo: dict[int, Any]) -> PickledDistribution:
        return self  # a copy is of this process, and uses the same process set

    @classmethod
    def of(
        cls,
        config: ReductionConfig,
        local: Sequence[Any],
        steps: int,
        average: bool,
        *,
        weights: Sequence[Any] | None,
        key: Callable[[Any], int],
    ) -> PickledDistribution:
        """Find the positions; variables of other models are left out.

        Args:
            config: the options.
            local: the variables whose gradients are not reduced.
            steps: the backward passes of a step.
            average: divide accumulated gradients by the number of passes.
            weights: of the model; None for an optimizer alone.
            key: the identity of a variable.

        Raises:
            TypeError: an optimizer alone has groups of variables, or local variables.
        """
        groups = config.groups if isinstance(config.groups, (list, tuple)) else None
        if weights is None and (groups or local):
            raise TypeError(
                "a distributed optimizer with groups=[[...]] or local variables cannot be pickled alone: pickle the "
                "model that has these variables"
            )
        positions = {key(variable): position for position, variable in enumerate(weights or ())}

        def known(variables: Sequence[Any]) -> list[int]:
            return [positions[key(variable)] for variable in variables if key(variable) in positions]

        if groups is not None:
            config = replace(config, groups=[group for group in map(known, groups) if group] or None)
        return cls(config, known(local), steps, average)

    def config_for(self, weights: Sequence[Any]) -> ReductionConfig:
        """The options, with groups of these weights."""
        groups = self.config.groups
        if not isinstance(groups, (list, tuple)):
            return self.config
        return replace(self.config, groups=[[weights[position] for position in group] for group in groups])


def patch_models(distribution_of: Callable[[Any], PickledDistribution | None], unpickled: Callable[..., Any]) -> None:
    """Make pickles and copies of models hold how their optimizer is distributed.

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
