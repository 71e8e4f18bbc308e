"""What leaves a process: copies on the CPU, since another one may have no GPU, or other ones."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from hvd_cluster.estimators.torch.model_pickling import copied

T = TypeVar("T")


def module_on_cpu(value: T) -> T:
    """A module itself where it is on the CPU, else a copy there: the user's own stays where it is.

    Anything else, such as a function, is handed back as it is.
    """
    if not isinstance(value, torch.nn.Module):
        return value
    if all(tensor.device.type == "cpu" for tensor in (*value.parameters(), *value.buffers())):
        return value
    return copied(value).cpu()


def on_cpu(state: Any) -> Any:
    """The same nest of dicts and lists with every tensor on the CPU, and numpy's scalars as Python's."""
    if isinstance(state, torch.Tensor):
        return state.detach().cpu()
    if isinstance(state, dict):
        return {key: on_cpu(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(on_cpu(value) for value in state)
    return state.item() if type(state).__module__ == "numpy" else state
