"""What the step clock misses of a backward pass: DDP's wait at its end, in C++."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from hvd_cluster.engine.request import Handle
from hvd_cluster.monitor.step_clock import step_clock

_engine = torch.autograd.Variable._execution_engine
#: The number that torch gives a backward pass, and the calls that were made in it.
_latest: tuple[int, list[Handle]] = (-1, [])


def in_training_thread() -> AbstractContextManager[None]:
    """A block that counts, also in a thread that torch makes for a backward pass.

    torch does that for GPUs.
    """
    return step_clock.in_this_thread() if _number() >= 0 else nullcontext()


def note_call(handle: Handle) -> None:
    """If this is in a backward pass, its end may wait for the future of the call.

    torch calls what is queued in the order of the queue: what is queued here, before DDP queues its wait for all
    buckets, is called when that begins, and what is queued then is called when it has ended.
    """
    global _latest
    number = _number()
    if number < 0:
        return
    if _latest[0] != number:
        _latest = number, []
        _engine.queue_callback(partial(_begin, _latest[1]))
    _latest[1].append(handle)


def _begin(calls: list[Handle]) -> None:
    pending = [handle for handle in calls if not handle.settled()]
    calls.clear()
    if pending:
        _engine.queue_callback(partial(_end, pending, time.monotonic()))


def _end(pending: list[Handle], begun_s: float) -> None:
    with step_clock.in_this_thread():
        for handle in sorted(filter(Handle.settled, pending), key=lambda handle: handle.decided_s):
            step_clock.note_wait(begun_s, handle.decided_s, handle.settled_s)
        step_clock.note_wait(begun_s, begun_s)


def _number() -> int:
    """That of the backward pass that runs in this thread, or -1."""
    return torch._C._current_graph_task_id()
