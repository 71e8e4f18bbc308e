"""Submission of torch tensors, and the table of the public integer handles."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hvd_cluster.engine.process_sets import ProcessSet, global_process_set
from hvd_cluster.engine.request import REDUCED_DTYPES, Handle
from hvd_cluster.engine.signature import Kind, ReduceOp
from hvd_cluster.engine.submission import finished, submit

_PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
#: What to pass instead of a tensor that has this method and wraps others: DTensor, AsyncCollectiveTensor.
_REMEDIES = {"full_tensor": "tensor.full_tensor() or tensor.to_local()", "wait": "tensor.wait()"}

_handles: dict[int, Handle] = {}
_next_handle = itertools.count()
_lock = threading.Lock()


def keep(handle: Handle) -> int:
    """The integer that stands for ``handle`` in public functions."""
    with _lock:
        number = next(_next_handle)
        _handles[number] = handle
    return number


def poll(handle: int) -> bool:
    """Whether the operation is done, so that :func:`synchronize` will not block.

    Raises:
        ValueError: the handle is unknown, or was synchronized already.
    """
    if handle not in _handles:
        raise ValueError(f"{handle!r} is not the handle of a pending operation")
    return _handles[handle].done


def synchronize(handle: int) -> Any:
    """Wait for an asynchronous operation; return its result, or None the second time.

    Args:
        handle: what the operation has returned.

    Raises:
        HorovodInternalError: the operation failed.
    """
    entry = _handles.get(handle)
    if entry is None:
        return None
    try:
        result = entry.wait()
    except BaseException as error:  # raised again, whichever of two kinds it is
        # Ctrl-C, or what a signal handler raises, ends only the wait: the operation still owns the tensors.
        if error is entry.error:
            _handles.pop(handle, None)
        raise
    if handle in _handles:
        # Not a call of pop(): a signal handler could raise after it, and the result would be lost.
        del _handles[handle]  # noqa: RUF051
    return result


def submit_tensors(
    kind: Kind,
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: ReduceOp = ReduceOp.SUM,
    prescale: float = 1.0,
    postscale: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    root: int = -1,
    wire: torch.dtype | None = None,
    in_place: bool = False,
    as_list: bool = False,
    is_waited_for: bool = False,
) -> Handle:
    """:func:`~hvd_cluster.engine.submission.submit` of torch tensors.

    The handle gives one tensor, or all ``as_list``.
    """
    originals = list(tensors)
    if not originals:
        return finished([])

    def finish(results: list[torch.Tensor]) -> Any:
        values = originals if in_place else results
        return values if as_list else values[0]

    return submit(
        kind,
        originals,
        process_set=process_set,
        name=name,
        op=op,
        root=root,
        prescale=prescale,
        postscale=postscale,
        wire=wire,
        in_place=in_place,
        prepare=checked,
        finish=finish,
        is_waited_for=is_waited_for,
    )


def checked(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The data of ``tensors``, outside autograd.

    Raises:
        ValueError: a tensor has an unsupported dtype, layout or device, or no memory of its own, or they are on several
            devices.
    """
    data = [_checked(tensor) for tensor in tensors]
    if len(data) > 1 and len({tensor.device for tensor in data}) > 1:
        raise ValueError("the tensors of a group must be on one device, but are on several")
    return data


def _checked(tensor: torch.Tensor) -> torch.Tensor:
    """The data of ``tensor``, outside autograd."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"expected a torch.Tensor, got {type(tensor).__name__}")
    if tensor.dtype not in REDUCED_DTYPES:
        raise ValueError(f"Tensor type {tensor.dtype} is not supported.")
    if not (tensor.is_cpu or tensor.is_cuda):
        raise ValueError(f"Tensor is on device {tensor.device}, which is not supported: move it to the CPU or a GPU.")
    if tensor.is_nested:
        raise ValueError("Tensor is nested: use tensor.to_padded_tensor(padding), or a group of its tensors")
    if tensor.layout != torch.strided:
        raise ValueError(
            f"Tensor is required to be contiguous. Its layout is {tensor.layout}: use hvd.sparse_allreduce_async, or "
            "tensor.to_dense()"
        )
    if not tensor.is_contiguous():
        raise ValueError("Tensor is required to be contiguous.")
    if tensor.is_neg():
        raise ValueError("Tensor is a negated view of another tensor: use tensor.resolve_neg()")
    require_memory(tensor)
    if tensor.is_inference():
        # It can only be written in inference mode, which the engine does not use: take another tensor over its memory.
        with torch.inference_mode(False):
            return torch.from_dlpack(tensor)  # type: ignore[attr-defined]
    # .data and not .detach(): autograd must not treat an in-place result as a forbidden change.
    return tensor.data


def require_memory(tensor: torch.Tensor) -> None:
    """Check that the elements of ``tensor`` are in its own memory.

    The engine reads and writes them there.

    Raises:
        ValueError: they are in other tensors, as those of a DTensor, or nowhere.
    """
    is_plain = type(tensor) in _PLAIN_TYPES
    wraps_others = not is_plain and is_traceable_wrapper_subclass(tensor)
    if not wraps_others:
        try:
            if tensor.data_ptr() or not tensor.numel():
                return
        except RuntimeError:  # torch.func traces it
            pass
    if is_plain:
        raise ValueError("Tensor has no memory: its storage was freed, or torch.func or torch.compile traces it.")
    remedy = next((text for method, text in _REMEDIES.items() if hasattr(tensor, method)), "those")
    raise ValueError(f"Tensor of type {type(tensor).__name__} has its elements in other tensors: use {remedy}.")
