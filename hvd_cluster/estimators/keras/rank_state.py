"""What one rank alone holds of a Keras fit: random numbers, and amid an epoch its metrics. Importing needs Keras."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import torch

from hvd_cluster.estimators.keras.state import as_array
from hvd_cluster.estimators.torch import random_state


def seed(model: Any, number: int, epoch: int, rank: int) -> None:
    """Seed all generators for an epoch of a rank, those of the model's random layers too."""
    random_state.seed_all(number, epoch, rank)
    for index, generator in enumerate(_seed_generators(model)):
        words = np.random.SeedSequence([number, epoch, rank, index]).generate_state(2)
        generator.state.assign(keras.ops.convert_to_tensor(words >> 1, dtype=generator.state.dtype))


def capture(model: Any) -> bytes:
    """The state amid an epoch, as bytes that hold nothing but arrays and numbers."""
    buffer = io.BytesIO()
    content = {
        "random": random_state.capture(),
        "seeds": _values([generator.state for generator in _seed_generators(model)]),
        "metrics": _values(model.metrics_variables),
    }
    torch.save(content, buffer)
    return buffer.getvalue()


def restore(model: Any, state: bytes) -> None:
    """Put back what :func:`capture` returned; the model has its metrics by now.

    Metrics that are others now begin anew, and so do random layers.
    """
    content = torch.load(io.BytesIO(state), map_location="cpu", weights_only=True)
    _assign([generator.state for generator in _seed_generators(model)], content["seeds"])
    _assign(model.metrics_variables, content["metrics"])
    random_state.restore(content["random"])


@contextlib.contextmanager
def metrics_kept(model: Any) -> Iterator[None]:
    """Put the metrics back as they were."""
    kept = _values(model.metrics_variables)
    yield
    _assign(model.metrics_variables, kept)


def _seed_generators(model: Any) -> list[Any]:
    """The generators of a model's random layers, in the order of the layers."""
    found = {}
    for layer in model._flatten_layers():
        held = [*getattr(layer, "_seed_generators", []), *vars(layer).values()]
        found.update({id(one): one for one in held if isinstance(one, keras.random.SeedGenerator)})
    return list(found.values())


def _values(variables: Sequence[Any]) -> list[torch.Tensor]:
    return [torch.from_numpy(np.array(as_array(variable))) for variable in variables]  # JAX's may not be written to


def _assign(variables: Sequence[Any], values: Sequence[torch.Tensor]) -> None:
    if [tuple(variable.shape) for variable in variables] != [tuple(value.shape) for value in values]:
        return
    for variable, value in zip(variables, values, strict=True):
        variable.assign(keras.ops.convert_to_tensor(value.numpy(), dtype=variable.dtype))
