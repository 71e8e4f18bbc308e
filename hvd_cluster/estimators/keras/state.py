"""Weights of a Keras model and variables of its optimizer, as tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hvd_cluster.errors import DataError


def capture(model: Any, rate_factor: float = 1.0) -> dict[str, Any]:
    """The state of a compiled model whose learning rate is ``rate_factor`` times that of one worker."""
    return {
        "weights": as_tensors(_weights(model)),
        "optimizer": as_tensors(_variables(model.optimizer)),
        "rate_factor": rate_factor,
    }


def restore(model: Any, state: Mapping[str, Any], run_id: str, rate_factor: float = 1.0) -> None:
    """Restore what :func:`capture` returned, with ``rate_factor`` times the learning rate of one worker.

    Raises:
        DataError: it is the state of another model or optimizer.
    """
    import keras

    optimizer = model.optimizer
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    weights, slots = _weights(model), _variables(optimizer)
    values = [value.numpy() for value in (*state["weights"], *state["optimizer"])]
    if [tuple(variable.shape) for variable in (*weights, *slots)] != [value.shape for value in values]:
        raise DataError(f"run_id={run_id!r} has a checkpoint of another model or optimizer: choose another run_id")
    if rate_factor != state["rate_factor"]:  # else the run keeps its exact rate
        for index, variable in enumerate(slots, len(weights)):
            if is_rate(variable):
                values[index] = values[index] / state["rate_factor"] * rate_factor
    for variable, value in zip((*weights, *slots), values, strict=True):
        variable.assign(keras.ops.convert_to_tensor(value, dtype=variable.dtype))


def _weights(model: Any) -> list[Any]:
    if hasattr(model, "jax_state_sync"):
        model.jax_state_sync()
    return list(model.weights)


def _variables(optimizer: Any) -> list[Any]:
    """The variables of the wrapped optimizer."""
    from hvd_cluster.keras.gradient_accumulation import without_accumulators

    with without_accumulators(optimizer):
        return list(optimizer.variables)


def is_rate(variable: Any) -> bool:
    """Whether a variable is the learning rate of an optimizer."""
    return bool(variable.path.rpartition("/")[2] == "learning_rate")


def has_pending_gradients(model: Any, passes_per_step: int) -> bool:
    """Whether the ranks hold gradients of backward passes that have made no step yet."""
    counters = [variable for variable in model.optimizer.variables if variable.path.endswith("hvd_passes")]
    return any(int(as_array(counter)) % passes_per_step for counter in counters)


def apply_pending_gradients(model: Any) -> None:
    """Make a step with the gradients of passes that have made none yet; every rank takes part."""
    getattr(model.optimizer, "inner_optimizer", model.optimizer).complete_passes()


def as_array(variable: Any) -> Any:
    """The value of a variable or tensor of Keras as a NumPy array; bfloat16 as float32, since NumPy has no bfloat16."""
    import keras

    value = keras.ops.convert_to_numpy(variable)
    return value.astype(np.float32) if value.dtype.name == "bfloat16" else value


def as_tensors(variables: Sequence[Any]) -> list[torch.Tensor]:
    """The values of variables or arrays, as copies on the CPU."""
    return [torch.from_numpy(np.array(as_array(variable))) for variable in variables]
