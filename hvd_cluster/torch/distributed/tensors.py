"""A call's tensors as the engine takes them: flat, contiguous, outside autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from hvd_cluster.engine.buffers import as_bytes, flat
from hvd_cluster.engine.request import describe
from hvd_cluster.engine.signature import TensorMeta
from hvd_cluster.torch.submission import require_memory


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory outside of autograd.

    Writing to it does not count as a change, as with torch's own backends.

    Raises:
        ValueError: the tensor has no memory of its own.
    """
    require_memory(tensor)
    if tensor.is_inference():  # other threads must be able to write to it
        storage, offset = tensor.untyped_storage(), tensor.storage_offset()
        with torch.inference_mode(False):
            alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            return alias.set_(storage, offset, tensor.size(), tensor.stride())
    return tensor.data


def source(tensor: torch.Tensor) -> torch.Tensor:
    """What to send of ``tensor``, of shape (elements,)."""
    data = plain(tensor)
    return flat(data if data.is_contiguous() else data.contiguous())


class Target:
    """Where one tensor's results go: its memory, or a copy if it is not contiguous."""

    def __init__(self, tensor: torch.Tensor, *, is_read: bool = False) -> None:
        self._tensor = plain(tensor)
        self._is_direct = self._tensor.is_contiguous()
        if self._is_direct:
            self.flat = flat(self._tensor)
        else:
            copy = (
                self._tensor.contiguous()
                if is_read
                else torch.empty_like(self._tensor, memory_format=torch.contiguous_format)
            )
            self.flat = flat(copy)

    def finish(self) -> None:
        """The results have arrived."""
        if not self._is_direct:
            self._tensor.copy_(self.flat.view(self._tensor.shape))


class ListTarget:
    """Where the results for a list of tensors of one type go, one after the other."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = [plain(tensor) for tensor in tensors]
        together = _joined(self._tensors)
        self._is_direct = together is not None
        if together is None:
            first = self._tensors[0]
            together = torch.empty(sum(t.numel() for t in self._tensors), dtype=first.dtype, device=first.device)
        self.flat = together

    def finish(self) -> None:
        """The results have arrived."""
        if not self._is_direct:
            parts = self.flat.split([tensor.numel() for tensor in self._tensors])
            for tensor, part in zip(self._tensors, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))


def finishing(targets: Sequence[Target | ListTarget]) -> Callable[[object], None]:
    """What finishes ``targets`` when their results have arrived."""

    def finish(_: object) -> None:
        for target in targets:
            target.finish()

    return finish


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The elements of several tensors, one after the other."""
    data = [plain(tensor) for tensor in tensors]
    together = _joined(data)
    return torch.cat([source(tensor) for tensor in data]) if together is None else together


def _joined(tensors: list[torch.Tensor]) -> torch.Tensor | None:
    """One view of tensors adjacent in memory, as a tensor's chunks; None for others."""
    first = tensors[0]
    is_run = all(tensor.is_contiguous() and tensor.numel() for tensor in tensors) and all(
        one.data_ptr() + one.nbytes == other.data_ptr() for one, other in pairwise(tensors)
    )
    size = sum(tensor.numel() for tensor in tensors)
    storage = first.untyped_storage()
    end = (first.storage_offset() + size) * first.element_size()
    is_run = is_run and all(tensor.untyped_storage().data_ptr() == storage.data_ptr() for tensor in tensors)
    if not is_run or end > storage.nbytes():
        return None
    return first.as_strided((size,), (1,))


def metas(tensors: Sequence[torch.Tensor]) -> tuple[TensorMeta, ...]:
    """What the ranks must agree on about flat tensors."""
    return tuple([describe(tensor) for tensor in tensors])


def real(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The memory of flat tensors as real numbers; of complex ones both parts in turn."""
    return [flat(torch.view_as_real(tensor)) if tensor.is_complex() else tensor for tensor in tensors]


def in_bytes(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The memory of flat tensors: what is only moved may have any element type."""
    return [as_bytes(tensor) for tensor in tensors]


def require_equal(tensors: Sequence[torch.Tensor], like: torch.Tensor, what: str, *, times: int = 1) -> None:
    """Check that each tensor has the type and ``times`` the elements of ``like``.

    Raises:
        ValueError: one differs.
    """
    for tensor in tensors:
        if tensor.dtype != like.dtype:
            raise ValueError(f"{what}: Invalid tensor type: expected {like.dtype}, got {tensor.dtype}")
        if tensor.numel() != times * like.numel():
            raise ValueError(
                f"{what}: Invalid tensor size: expected {times * like.numel()} elements, got {tuple(tensor.shape)}"
            )


def elements_by_rank(tensor: torch.Tensor, rows: list[int], num_ranks: int) -> list[int]:
    """Each rank's elements of ``tensor``, by its rows; equal if ``rows`` is empty.

    Raises:
        ValueError: the rows of the tensor are others, or cannot be divided equally.
    """
    num_rows = tensor.shape[0] if tensor.dim() else 0
    if not rows:
        if num_rows % num_ranks:
            raise ValueError("Tensor's dim 0 does not divide equally across group size")
        rows = [num_rows // num_ranks] * num_ranks
    if len(rows) != num_ranks or sum(rows) != num_rows:
        raise ValueError("Split sizes doesn't match total dim 0 size")
    per_row = tensor.numel() // num_rows if num_rows else 0
    return [count * per_row for count in rows]
