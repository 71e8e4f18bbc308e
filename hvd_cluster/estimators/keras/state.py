"""Weights of a Keras model and variables of its optimizer, as bytes that hold nothing but arrays."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np

from hvd_cluster.errors import DataError


def capture(model: Any, rate_factor: float = 1.0, more: Mapping[str, Any] | None = None) -> bytes:
    """The state of a compiled model whose learning rate is ``rate_factor`` times that of one worker; ``.npz``.

    Args:
        more: further arrays, which :func:`restore` passes over; "weight" and "optimizer" begin no name of theirs.
    """
    arrays = {**(more or {})}
    arrays |= {f"weight.{index}": as_array(variable) for index, variable in enumerate(_weights(model))}
    for index, variable in enumerate(_variables(_optimizer(model))):
        value = as_array(variable)
        arrays[f"optimizer.{index}"] = value / rate_factor if is_rate(variable) else value
        if is_rate(variable):
            arrays[f"exact.{index}"] = value
    arrays["rate_factor"] = np.float64(rate_factor)
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def restore(model: Any, state: bytes, run_id: str, rate_factor: float = 1.0) -> None:
    """Put the state back, the learning rate ``rate_factor`` times that of one worker.

    Raises:
        DataError: it is the state of another model or optimizer.
    """
    import keras

    optimizer = _optimizer(model)
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    refusal = f"run_id={run_id!r} has a checkpoint of another model or optimizer: choose another run_id"
    with np.load(io.BytesIO(state)) as arrays:
        if "rate_factor" not in arrays:  # Lightning's files are archives too
            raise DataError(refusal)
        weights = _weights(model)
        pairs = [(variable, arrays.get(f"weight.{index}")) for index, variable in enumerate(weights)]
        same_factor = float(arrays["rate_factor"]) == rate_factor
        for index, variable in enumerate(_variables(optimizer)):
            value = arrays.get(f"optimizer.{index}")
            if is_rate(variable) and value is not None:
                value = arrays[f"exact.{index}"] if same_factor else value * rate_factor
            pairs.append((variable, value))
        shapes = [(tuple(variable.shape), None if value is None else value.shape) for variable, value in pairs]
        num_arrays = sum(name.startswith(("weight.", "optimizer.")) for name in arrays)
        if num_arrays != len(pairs) or any(mine != theirs for mine, theirs in shapes):
            raise DataError(refusal)
        for variable, value in pairs:
            variable.assign(keras.ops.convert_to_tensor(value, dtype=variable.dtype))


def rate_of(model: Any) -> float:
    """The optimizer's learning rate of now."""
    return float(as_array(_optimizer(model).learning_rate))


def _weights(model: Any) -> list[Any]:
    if hasattr(model, "jax_state_sync"):
        model.jax_state_sync()
    return list(model.weights)


def _optimizer(model: Any) -> Any:
    return model.optimizer


def _unscaled(optimizer: Any) -> Any:
    """The optimizer, or the one that is inside where it scales the loss."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def _variables(optimizer: Any) -> list[Any]:
    """Those of the optimizer that was wrapped."""
    from hvd_cluster.keras.gradient_accumulation import without_accumulators

    with without_accumulators(optimizer):
        return list(optimizer.variables)


def is_rate(variable: Any) -> bool:
    """Whether a variable of an optimizer is its learning rate."""
    return bool(variable.path.rpartition("/")[2] == "learning_rate")


def is_amid_passes(model: Any, per_step: int) -> bool:
    """Whether gradients of passes that make no step yet are held, by each rank its own."""
    counters = [variable for variable in _optimizer(model).variables if variable.path.endswith("hvd_passes")]
    return any(int(as_array(counter)) % per_step for counter in counters)


def complete_passes(model: Any) -> None:
    """Take a step with gradients of passes that make none yet; every rank takes part."""
    _unscaled(_optimizer(model)).complete_passes()


def as_array(variable: Any) -> Any:
    """The value of a variable or tensor of Keras, as NumPy has it in files."""
    import keras

    value = keras.ops.convert_to_numpy(variable)
    return value.astype(np.float32) if value.dtype.name == "bfloat16" else value  # NumPy's files do not know it
