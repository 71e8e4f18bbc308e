"""The backward pass that runs in the calling thread, and callbacks at its end."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import partial
from types import FrameType

import torch
from torch.amp import GradScaler
from torch.utils.checkpoint import CheckpointFunction

#: Packages whose code reads gradients from an optimizer's parameter groups, to clip them or to find overflows.
_READERS = ("torch.amp", "torch.cuda.amp", "lightning", "pytorch_lightning", "lightning_fabric", "accelerate", "apex")

#: torch does not nest passes more deeply; older entries belong to passes that ended with an exception.
_MAX_OPEN_PASSES = 64

#: By the id of a running pass: the callbacks at its end, by their order.
_at_end: dict[int, dict[int, Callable[[bool], None]]] = {}
_lock = threading.Lock()


def is_running() -> bool:
    """True inside a backward pass of this thread."""
    return current_pass() != -1


def current_pass() -> int:
    """The id of the backward pass that runs in this thread, or -1. A re-entrant checkpoint's pass has its own."""
    return int(torch._C._current_graph_task_id())


def call_at_end(pass_id: int, order: int, callback: Callable[[bool], None]) -> None:
    """Run ``callback`` when this thread's backward pass has accumulated its last gradient.

    Args:
        pass_id: :func:`current_pass`.
        order: callbacks of one pass run in this order; a second one of the same number is ignored.
        callback: gets True where the pass was that of a re-entrant checkpoint, so that another one continues.
    """
    with _lock:
        callbacks = _at_end.get(pass_id)
        is_first = callbacks is None
        if callbacks is None:
            while len(_at_end) >= _MAX_OPEN_PASSES:
                del _at_end[min(_at_end)]
            callbacks = _at_end[pass_id] = {}
        callbacks.setdefault(order, callback)
    if is_first:
        # autograd's engine is untyped.
        torch.autograd.Variable._execution_engine.queue_callback(partial(_end, pass_id))


def _end(pass_id: int) -> None:
    with _lock:
        callbacks = _at_end.pop(pass_id, {})
    is_nested = in_checkpoint()
    for _, callback in sorted(callbacks.items()):
        callback(is_nested)


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
