"""From a torch call to a request of the engine: names, checks, and the table of open handles."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from hvd_cluster.engine.process_sets import ProcessSet
from hvd_cluster.engine.request import (
    OPEN_KINDS,
    REDUCED_DTYPES,
    Handle,
    Kind,
    ReduceOp,
    Request,
    Signature,
    describe,
    dtype_name,
    recorded_event,
)
from hvd_cluster.engine.submission import process_set_id, running_engine
from hvd_cluster.errors import HorovodInternalError

_handles: dict[int, Handle] = {}
_next_handle = itertools.count()
_lock = threading.Lock()

_PREFIXES = {kind: kind.value for kind in Kind}


def submit(
    kind: Kind,
    tensors: Sequence[torch.Tensor],
    *,
    process_set: ProcessSet,
    name: str | None,
    in_place: bool = False,
    op: ReduceOp = ReduceOp.SUM,
    root: int = -1,
    prescale: float = 1.0,
    postscale: float = 1.0,
    wire: torch.dtype | None = None,
    members: int = -1,
    splits: tuple[int, ...] = (),
    finish: Callable[[list[torch.Tensor]], Any],
    is_waited_for: bool = False,
    labels: Sequence[str] = (),
    unnamed: str = "noname",
) -> int:
    """Hand tensors to the engine.

    Args:
        kind: the collective.
        tensors: one, or those of a group; dense and contiguous.
        process_set: whose ranks take part.
        name: what the ranks are matched by; None takes the next number of this kind of operation.
        in_place: write the results into ``tensors``.
        op: the reduction.
        root: the global rank that a broadcast starts from.
        prescale: factor before the reduction.
        postscale: factor after it.
        wire: element type in which floating-point tensors travel and are added; allreduce only.
        members: a number that says which tensors are in a group, where their shapes and types do not.
        splits: rows for each rank; alltoall only.
        finish: makes the value of the handle out of the results.
        is_waited_for: the caller waits for the handle next, so no other thread needs to make progress.
        labels: what the timeline calls the tensors, where the request's name does not say it.
        unnamed: the family that an operation without a name is numbered in.

    Returns:
        A handle for :func:`synchronize` and :func:`poll`.

    Raises:
        ValueError: a tensor cannot be sent, or a request of this name is under way.
        HorovodInternalError: ``init()`` has not been called, or the world has ended.
    """
    engine = running_engine()
    set_id = process_set_id(process_set)
    data = [_checked(tensor) for tensor in tensors]
    if len(data) > 1 and len({tensor.device for tensor in data}) > 1:
        raise ValueError("the tensors of a group have to be on one device, and are on several")
    is_open = kind in OPEN_KINDS
    metas = tuple([describe(tensor, any_first_dimension=is_open) for tensor in data])
    signature = Signature(kind, metas, op, root, float(prescale), float(postscale), wire=_name(wire), members=members)
    prefix = _PREFIXES[kind]
    handle = Handle(engine.progress)
    request = Request(
        f"{prefix}.{unnamed if name is None else name}",
        set_id,
        signature,
        data,
        data if in_place else [],
        finish,
        handle,
        splits,
        ready_event=recorded_event(data),
        labels=labels,
        is_unnamed=name is None,
    )
    return keep(engine.submit(request, is_waited_for=is_waited_for))


def keep(handle: Handle) -> int:
    """The public number of ``handle``."""
    with _lock:
        number = next(_next_handle)
        _handles[number] = handle
    return number


def poll(handle: int) -> bool:
    """True when the operation is done, so that :func:`synchronize` will not block.

    Raises:
        ValueError: the handle is not open: it was synchronized already, or never given out.
    """
    if handle not in _handles:
        raise ValueError(f"{handle!r} is not the handle of an operation under way")
    return _handles[handle].done


def synchronize(handle: int) -> Any:
    """Wait for an asynchronous operation and return its result; None for a handle that is not open.

    Raises:
        HorovodInternalError: the operation failed.
    """
    entry = _handles.get(handle)
    if entry is None:
        return None
    try:
        result = entry.wait()
    except BaseException as error:  # raised again
        # Ctrl-C, or what a signal's handler raises, ends the wait only: the operation still owns the tensors.
        if error is entry.error:
            _handles.pop(handle, None)
        raise
    if handle in _handles:
        # Not by a call, after which a signal handler could raise, and the result would be lost.
        del _handles[handle]  # noqa: RUF051
    return result


def synchronize_all(handles: Iterable[int]) -> None:
    """Wait for all, also behind one that failed: their tensors are in use until then.

    Raises:
        HorovodInternalError: the first error.
    """
    error: HorovodInternalError | None = None
    for handle in handles:
        try:
            synchronize(handle)
        except HorovodInternalError as failure:
            error = error or failure
    if error is not None:
        raise error


def keep_finished(value: Any) -> int:
    """The handle of an operation that had nothing to do."""
    handle = Handle()
    handle.succeed(value)
    return keep(handle)


def _name(wire: torch.dtype | None) -> str:
    return "" if wire is None else dtype_name(wire)


def _checked(tensor: torch.Tensor) -> torch.Tensor:
    """The data of ``tensor``, outside autograd."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"expected a torch.Tensor, and was given {type(tensor).__name__}")
    if tensor.dtype not in REDUCED_DTYPES:
        raise ValueError(f"Tensor type {tensor.dtype} is not supported.")
    if not (tensor.is_cpu or tensor.is_cuda):
        raise ValueError(f"Tensor is on device {tensor.device}, which is not supported: move it to the CPU or a GPU.")
    if tensor.layout != torch.strided:
        raise ValueError(
            f"Tensor is required to be contiguous. Its layout is {tensor.layout}: use hvd.sparse_allreduce_async, or "
            "tensor.to_dense()"
        )
    if not tensor.is_contiguous():
        raise ValueError("Tensor is required to be contiguous.")
    if tensor.is_neg():
        raise ValueError("Tensor is the negated view of another one, and has to be its own: use tensor.resolve_neg()")
    if tensor.is_inference():
        # It may be written in inference mode only, where the engine is not: take another one over its memory.
        with torch.inference_mode(False):
            return torch.from_dlpack(tensor)  # type: ignore[attr-defined]
    # .data and not .detach(): an in-place result must not count as a change that autograd objects to.
    return tensor.data
