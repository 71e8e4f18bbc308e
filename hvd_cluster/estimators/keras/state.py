"""Weights of a Keras model and variables of its optimizer, as tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hvd_cluster.errors import DataError
from hvd_cluster.estimators.keras.structure import as_tensor
from hvd_cluster.estimators.torch import made_state


def capture(model: Any, rate_factor: float = 1.0, made: Mapping[str, str] | None = None) -> dict[str, Any]:
    """A compiled model's state, at ``rate_factor`` times one worker's learning rate.

    Args:
        made: the :func:`contents` of what a factory makes. Weights that still have its values are None in the state.
    """
    weights: list[torch.Tensor | None] = [*as_tensors(weights_of(model))]
    if made is not None:
        now = contents(model, hashed=made_state.equal_names(made))
        changed = made_state.changed_names(now, made)
        weights = [value if name in changed else None for name, value in zip(now, weights, strict=True)]
    return {
        **({} if made is None else {"made": dict(made)}),
        "weights": weights,
        "optimizer": as_tensors(_variables(model.optimizer)),
        "rate_factor": rate_factor,
    }


def restore(model: Any, state: Mapping[str, Any], run_id: str, rate_factor: float = 1.0) -> None:
    """Restore a :func:`capture`, at ``rate_factor`` times one worker's learning rate.

    Raises:
        DataError: it is the state of another model or optimizer.
    """
    import keras

    optimizer = model.optimizer
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    weights, slots = weights_of(model), _variables(optimizer)
    values = [None if value is None else value.numpy() for value in (*state["weights"], *state["optimizer"])]
    variables = [*weights, *slots]
    if len(variables) != len(values) or not all(map(_fits, variables, values)):
        raise DataError(f"run_id={run_id!r} has a checkpoint of another model or optimizer: choose another run_id")
    if rate_factor != state["rate_factor"]:  # else the run keeps its exact rate
        for index, variable in enumerate(slots, len(weights)):
            if is_rate(variable):
                values[index] = values[index] / state["rate_factor"] * rate_factor
    for variable, value in zip(variables, values, strict=True):
        if value is not None:
            variable.assign(keras.ops.convert_to_tensor(value, dtype=variable.dtype))


def _fits(variable: Any, value: Any) -> bool:
    return value is None or tuple(variable.shape) == value.shape


def contents(model: Any, hashed: Collection[str] = ()) -> dict[str, str]:
    """Each weight's dtype and shape, and the hash of frozen or ``hashed`` values."""
    trainable = {id(variable) for variable in model.trainable_weights}
    return {
        name: made_state.described(as_tensors([variable])[0], id(variable) not in trainable or name in hashed)
        for name, variable in named_weights(model).items()
    }


def named_weights(model: Any) -> dict[str, Any]:
    """The variables of :func:`weights_of` by the names that messages have for them."""
    return {f"weight {index} ({variable.name})": variable for index, variable in enumerate(weights_of(model))}


def weights_of(model: Any) -> list[Any]:
    """The variables of the model's weights, with their values up to date."""
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
    """Make a step of the gradients that are pending; every rank takes part."""
    getattr(model.optimizer, "inner_optimizer", model.optimizer).complete_passes()


def as_array(variable: Any) -> Any:
    """A variable's or tensor's NumPy array; bfloat16, which NumPy lacks, as float32."""
    import keras

    value = keras.ops.convert_to_numpy(variable)
    return value.astype(np.float32) if value.dtype.name == "bfloat16" else value


def as_tensors(variables: Sequence[Any]) -> list[torch.Tensor]:
    """The values of variables or arrays, as copies on the CPU."""
    return [as_tensor(as_array(variable)) for variable in variables]
