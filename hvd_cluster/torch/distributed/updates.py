"""Ends of the monitor's steps, where an optimizer of torch applies its update.

They count while the default group is "hvd".
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hvd_cluster.engine.compiled_steps import keep_untraced
from hvd_cluster.monitor.step_clock import COMPUTE, OPTIMIZER, step_clock
from hvd_cluster.monitor.timed_calls import timed
from hvd_cluster.torch.timed_calls import time_calls_of_torch

_hooks: list[Any] = []


def count_updates() -> None:
    """Make each optimizer's updates end a step; a second call has no effect."""
    time_calls_of_torch()
    if not _hooks:
        _hooks[:] = register_optimizer_step_pre_hook(_before), register_optimizer_step_post_hook(_after)


def ignore_updates() -> None:
    """End what :func:`count_updates` has begun."""
    while _hooks:
        _hooks.pop().remove()


def _before(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    keep_untraced()
    if _is_part(sys._getframe(1)):
        return None
    step_clock.enter(OPTIMIZER)
    # The closure is the forward and the backward pass.
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": timed(kwargs["closure"], COMPUTE)}
    if len(args) > 1 and callable(args[1]):
        return (args[0], timed(args[1], COMPUTE), *args[2:]), kwargs
    return None


def _after(*_: object) -> None:
    keep_untraced()
    if not _is_part(sys._getframe(1)):
        step_clock.end_step()


def _is_part(step: FrameType) -> bool:
    """Whether a frame's ``step()`` call of an optimizer is a part of another one's.

    That is one of this package, or one that torch has wrapped too, such as that of ZeroRedundancyOptimizer.
    """
    outer = step.f_back
    while outer is not None and outer.f_code is not step.f_code:
        outer = outer.f_back
    return step_clock.is_updating or outer is not None
