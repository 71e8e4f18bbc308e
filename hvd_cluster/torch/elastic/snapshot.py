"""Copies of state dicts that reuse the last copy's memory: commits allocate none."""

from __future__ import annotations

import copy
from typing import Any

import torch

from hvd_cluster.elastic.state import copied as copied_value


def copied(value: Any, before: Any = None) -> Any:
    """A copy of ``value`` that shares no tensor with it.

    Args:
        value: tensors and plain data in dicts, lists and tuples.
        before: an earlier copy; its tensors are overwritten where they fit.
    """
    if isinstance(value, torch.Tensor):
        if _fits(value, before):
            before.copy_(value.detach())
            return before
        return value.detach().clone()
    if isinstance(value, dict):
        old = before if isinstance(before, dict) else {}
        new = copy.copy(value)  # a module's state dict has attributes: the versions that its modules load by
        for key, entry in value.items():
            new[key] = copied(entry, old.get(key))
        return new
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        olds = before if isinstance(before, (list, tuple)) and len(before) == len(value) else [None] * len(value)
        return type(value)(copied(entry, old) for entry, old in zip(value, olds, strict=True))
    return copied_value(value)


def _fits(value: torch.Tensor, before: Any) -> bool:
    return (
        isinstance(before, torch.Tensor)
        and before.shape == value.shape
        and before.dtype == value.dtype
        and before.device == value.device
        and before.layout == value.layout == torch.strided
    )
