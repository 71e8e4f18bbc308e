"""Memory for buckets: reused byte buffers, and the layout of tensors in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from hvd_cluster.engine.fusion import aligned

#: A new buffer of 100 MB costs 65 to 94 ms at first touch, so buffers are kept; a step rarely needs more at once.
_KEPT_PER_DEVICE = 4
#: A larger buffer was for a single huge request and is freed.
_MAX_KEPT_BYTES = 256 << 20


class BufferPool:
    """Byte buffers, kept for reuse. Only the progress thread uses them."""

    def __init__(self) -> None:
        self._free: dict[torch.device, list[torch.Tensor]] = {}

    @contextmanager
    def lease(self, num_bytes: int, device: torch.device) -> Iterator[torch.Tensor]:
        """An undefined uint8 tensor (num_bytes,) on ``device`` for the ``with`` block."""
        free = self._free.setdefault(device, [])
        fitting = [buffer for buffer in free if buffer.numel() >= num_bytes]
        if fitting:
            buffer = min(fitting, key=torch.Tensor.numel)
            _remove(free, buffer)
        else:
            buffer = torch.empty(aligned(num_bytes), dtype=torch.uint8, device=device)
        try:
            yield buffer[:num_bytes]
        finally:
            if buffer.numel() <= _MAX_KEPT_BYTES:
                free.append(buffer)
            if len(free) > _KEPT_PER_DEVICE:
                _remove(free, min(free, key=torch.Tensor.numel))


def layout(tensors: Sequence[torch.Tensor], itemsize: int | None = None) -> tuple[list[slice], int]:
    """Each tensor's slice of bytes in a bucket, and the bucket's length in bytes.

    Args:
        tensors: what is packed.
        itemsize: bytes of one element in the bucket, if it differs from that of the tensors.
    """
    slices = []
    position = 0
    for tensor in tensors:
        num_bytes = tensor.numel() * (itemsize or tensor.element_size())
        slices.append(slice(position, position + num_bytes))
        position += aligned(num_bytes)
    return slices, position


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor, as uint8 of shape (num_bytes,)."""
    return flat(tensor).view(torch.uint8)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory, as its element type of shape (num_elements,)."""
    if tensor.dim() == 1 and tensor.stride(0) == 1:
        return tensor
    # A tensor of one element counts as contiguous with any stride, and then cannot be viewed as anything else.
    return tensor.as_strided((tensor.numel(),), (1,))


def _remove(buffers: list[torch.Tensor], buffer: torch.Tensor) -> None:
    buffers[:] = [other for other in buffers if other is not buffer]  # list.remove() would compare elements
