"""Where the calling thread stands in torch's backward pass."""

from __future__ import annotations

import sys
from types import FrameType

import torch
from torch.utils.checkpoint import CheckpointFunction


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
