"""Where the calling thread stands in torch's backward pass."""

from __future__ import annotations

import sys
from types import FrameType

import torch
from torch.amp import GradScaler
from torch.utils.checkpoint import CheckpointFunction

#: Packages whose code takes gradients from an optimizer's parameter groups, to clip them or to look for overflows.
_READERS = ("torch.amp", "torch.cuda.amp", "lightning", "pytorch_lightning", "lightning_fabric", "accelerate", "apex")


def is_running() -> bool:
    """True inside a backward pass of this thread."""
    return int(torch._C._current_graph_task_id()) != -1


def in_checkpoint() -> bool:
    """True inside the backward pass that a re-entrant checkpoint runs within another one."""
    inner = CheckpointFunction.backward.__code__
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not inner:
        frame = frame.f_back
    return frame is not None


def reads_gradients(frame: FrameType) -> bool:
    """True for code that reads an optimizer's parameter groups for their gradients, and not for a rate to log."""
    module = str(frame.f_globals.get("__name__", ""))
    return module.startswith(_READERS) or isinstance(frame.f_locals.get("self"), GradScaler)
