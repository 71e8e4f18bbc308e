"""Collectives as functions of autograd.

That costs as much time as a sixth of a small collective.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad


def differentiable(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply``, but only ``function.forward`` where no gradient is wanted."""
    apply: Callable[..., Any] = function.apply
    forward: Callable[..., Any] = function.forward

    def call(*arguments: Any) -> Any:
        return apply(*arguments) if _records(arguments) else forward(_Unrecorded(), *arguments)

    return call


class _Unrecorded:
    """The context of a call that autograd does not record."""

    def mark_non_differentiable(self, *_: torch.Tensor) -> None:
        """Nothing is differentiable here."""


def _records(arguments: tuple[Any, ...]) -> bool:
    """Whether autograd records the call: backward, forward or for ``torch.func``."""
    if torch.is_grad_enabled():
        for argument in arguments:
            if isinstance(argument, torch.Tensor) and argument.requires_grad:
                return True
    # It raises that these are not supported; the call alone would return a result without a gradient.
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()
