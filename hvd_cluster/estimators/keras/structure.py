"""The structure of what Keras models take and return: one array, several, a dict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch


def structured(arrays: Sequence[Any], keys: Sequence[str] | None) -> Any:
    """One array as is; several as a tuple, or as a dict if there are ``keys``.

    TensorFlow would stack a list.
    """
    if keys is not None:
        return dict(zip(keys, arrays, strict=True))
    return arrays[0] if len(arrays) == 1 else tuple(arrays)


def flat(outputs: Any, keys: Sequence[str] | None = None) -> list[Any]:
    """A model's outputs as a list, of one, a list or tuple, or a dict with ``keys``."""
    if isinstance(outputs, Mapping):
        return [outputs[key] for key in keys or outputs]
    return list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]


def as_tensor(array: Any) -> torch.Tensor:
    """A copy of a Keras array as a tensor; bfloat16, which NumPy lacks, as float32."""
    array = np.array(array)
    return torch.from_numpy(array.astype(np.float32) if array.dtype.name == "bfloat16" else array)


def inputs_of(model: Any) -> Any:
    """The inputs' structure if a functional model or Sequential knows it; else None."""
    return getattr(getattr(model, "_functional", model), "_inputs_struct", None)


def outputs_of(model: Any) -> Any:
    """The same of its outputs."""
    return getattr(getattr(model, "_functional", model), "_outputs_struct", None)


def output_keys(outputs: Any, model: Any, order: Sequence[str] = ()) -> tuple[str, ...] | None:
    """The names of a model's outputs, the labels' first; None if it returns no dict.

    An eager call, ``predict_on_batch`` and other backends return the same dict in different orders.

    Args:
        outputs: what the model returned.
        order: the first of them, if they are names; the others are in the order of the functional model, or of
            ``outputs``.
    """
    keys = keys_of(outputs)
    defined = keys_of(outputs_of(model)) or ()
    if keys is None:
        return None
    keys = defined if set(defined) == set(keys) else keys
    return tuple(dict.fromkeys((*order, *keys))) if set(order) <= set(keys) else keys


def keys_of(structure: Any) -> tuple[str, ...] | None:
    """The names in a structure of inputs or outputs; None if it is not a dict."""
    return tuple(structure) if isinstance(structure, Mapping) else None
