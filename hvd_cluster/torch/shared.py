"""Tensors in a host's shared memory, which an allreduce in place does not copy."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvd_cluster.engine.membership import running_engine


def shared_empty(size: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """An uninitialized tensor in shared memory, if the workers share memory.

    ``allreduce_`` and the other in-place allreduces work on such tensors without a copy, if the tensor of every
    rank is one, or a contiguous part of one. This helps with large tensors: it is two to three times as fast at 100 MB,
    and makes little difference below 16 MB. The result is an ordinary tensor if some workers are on other hosts, with
    ``HOROVOD_SHARED_MEMORY=0``, or if there is only one worker. Memory is allocated at the call and freed with the last
    reference; the tensor stays valid after ``shutdown()``.

    The following move a tensor out of shared memory; it is then copied again, and nothing else changes: ``.to()``,
    ``.clone()``, ``.share_memory_()``, a ``torch.multiprocessing`` queue, pickling, ``set_()``, and assigning a new
    tensor in its place, as ``zero_grad(set_to_none=True)`` does to ``p.grad``.

    Args:
        size: the shape, as for ``torch.empty``; dense and on the CPU.
        dtype: the element type; torch's default if None.

    Raises:
        HorovodInternalError: ``init()`` has not been called.
        MemoryError: this worker's share of the memory is used up; ``HOROVOD_SHARED_MEMORY_REGION_MB`` sets it.
    """
    shape = (size,) if isinstance(size, int) else tuple(size)
    dtype = torch.get_default_dtype() if dtype is None else dtype
    arena = running_engine().arena
    return torch.empty(shape, dtype=dtype, device="cpu") if arena is None else arena.empty(shape, dtype)


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is in the memory that the workers of this host share.

    Raises:
        HorovodInternalError: ``init()`` has not been called.
    """
    arena = running_engine().arena
    return arena is not None and tensor.is_cpu and arena.offset_of(tensor) >= 0
