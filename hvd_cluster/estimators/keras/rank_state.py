"""What one rank holds in an epoch: random generators and metrics. Imports Keras."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import torch

from hvd_cluster.estimators.keras.state import as_tensors
from hvd_cluster.estimators.run import random_state


def seed(model: Any, number: int, epoch: int, rank: int) -> None:
    """Seed a rank's generators for an epoch, including the model's random layers'."""
    random_state.seed_all(number, epoch, rank)
    for index, generator in enumerate(_seed_generators(model)):
        words = np.random.SeedSequence([number, epoch, rank, index]).generate_state(2)
        generator.state.assign(keras.ops.convert_to_tensor(words >> 1, dtype=generator.state.dtype))


def capture(model: Any) -> dict[str, Any]:
    """The state within an epoch, as tensors and numbers."""
    return {
        "random": random_state.capture(),
        "seeds": as_tensors([generator.state for generator in _seed_generators(model)]),
        "metrics": as_tensors(model.metrics_variables),
    }


def restore(model: Any, state: Mapping[str, Any]) -> None:
    """Restore what :func:`capture` returned, once the model has its metrics.

    Random layers or metrics that differ now start from their initial state.
    """
    assign([generator.state for generator in _seed_generators(model)], state["seeds"])
    assign(model.metrics_variables, state["metrics"])
    random_state.restore(state["random"])


def _seed_generators(model: Any) -> list[Any]:
    """The generators of a model's random layers, in the order of the layers."""
    found = {}
    for layer in model._flatten_layers():
        held = [*getattr(layer, "_seed_generators", []), *vars(layer).values()]
        found.update({id(one): one for one in held if isinstance(one, keras.random.SeedGenerator)})
    return list(found.values())


def assign(variables: Sequence[Any], values: Sequence[torch.Tensor]) -> None:
    """Set ``variables``, unless their shapes are others."""
    if [tuple(variable.shape) for variable in variables] != [tuple(value.shape) for value in values]:
        return
    for variable, value in zip(variables, values, strict=True):
        variable.assign(keras.ops.convert_to_tensor(value.numpy(), dtype=variable.dtype))
