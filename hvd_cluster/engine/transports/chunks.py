"""How tensors pass through shared memory: dealt into chunks, scaled and converted on their way in and out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from hvd_cluster.engine.buffers import flat
from hvd_cluster.engine.request import ReduceOp
from hvd_cluster.engine.scaling import copy_scaled, finish_scaled

REDUCE: dict[ReduceOp, Callable[..., Any]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.PRODUCT: torch.mul,
}
#: Halving loses nothing in these, short of the very smallest numbers.
_HALVED_EXACTLY = frozenset({torch.float32, torch.float64, torch.bfloat16})


class Chunk(NamedTuple):
    """Runs of elements that pass through a slot together, one behind the other."""

    sources: list[torch.Tensor]
    targets: list[torch.Tensor]
    length: int


class Arithmetic(NamedTuple):
    """What happens to the elements on their way."""

    reduce: Callable[..., Any]
    prescale: float
    postscale: float
    divisor: int

    @classmethod
    def of(cls, op: ReduceOp, prescale: float, postscale: float, divisor: int) -> Arithmetic:
        """SUM, MIN, MAX or PRODUCT, with its factors."""
        return cls(REDUCE[op], prescale, postscale, divisor)

    def early(self, dtype: torch.dtype) -> Arithmetic:
        """The same with the division where the elements are copied in, if the result has the same bits.

        Only dividing by a power of two gives the same bits as dividing the sum.
        """
        if self.divisor > 1 and halves_exactly(dtype, self.divisor):
            return self._replace(prescale=self.prescale / self.divisor, divisor=1)
        return self

    def fill(self, slot: torch.Tensor, sources: Sequence[torch.Tensor]) -> None:
        """``slot = sources * prescale``, in the element type of ``slot``."""
        if slot.dtype != sources[0].dtype:
            copy_all(slot.split([source.numel() for source in sources]), sources)
            if self.prescale != 1.0:
                copy_scaled(slot, slot, self.prescale)
        elif self.prescale != 1.0 and slot.is_floating_point():
            if len(sources) == 1:
                torch.mul(sources[0], self.prescale, out=slot)
            else:
                torch.cat(list(sources), out=slot).mul_(self.prescale)
        else:
            if len(sources) == 1:
                slot.copy_(sources[0])
            else:
                torch.cat(list(sources), out=slot)
            if self.prescale != 1.0:
                copy_scaled(slot, slot, self.prescale)

    def finish(self, result: torch.Tensor) -> None:
        """``result = result * postscale / divisor``."""
        if self.divisor != 1 and self.postscale == 1.0 and halves_exactly(result.dtype, self.divisor):
            result.mul_(1.0 / self.divisor)
        elif self.postscale != 1.0 or self.divisor != 1:
            finish_scaled(result, result, self.postscale, self.divisor)


def chunks_of(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], capacity: int) -> list[Chunk]:
    """Deal tensors into chunks of at most ``capacity`` elements; long ones pass in several, small ones together."""
    chunks: list[Chunk] = []
    sources: list[torch.Tensor] = []
    targets: list[torch.Tensor] = []
    filled = 0
    for tensor, output in zip(inputs, outputs, strict=True):
        source = flat(tensor)
        target = source if output is tensor else flat(output)
        if source.numel() > capacity:
            pieces = zip(source.split(capacity), target.split(capacity), strict=True)
            chunks += [Chunk([piece], [place], piece.numel()) for piece, place in pieces]
            continue
        if filled + source.numel() > capacity:
            chunks.append(Chunk(sources, targets, filled))
            sources, targets, filled = [], [], 0
        if source.numel():
            sources.append(source)
            targets.append(target)
            filled += source.numel()
    if sources:
        chunks.append(Chunk(sources, targets, filled))
    return chunks


def full_chunks_of(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], capacity: int) -> list[Chunk]:
    """Deal tensors into chunks of exactly ``capacity`` elements, the last one perhaps of fewer."""
    chunks: list[Chunk] = []
    sources: list[torch.Tensor] = []
    targets: list[torch.Tensor] = []
    filled = 0
    for tensor, output in zip(inputs, outputs, strict=True):
        source = flat(tensor)
        target = source if output is tensor else flat(output)
        start = 0
        while start < source.numel():
            length = min(source.numel() - start, capacity - filled)
            sources.append(source[start : start + length])
            targets.append(target[start : start + length])
            start, filled = start + length, filled + length
            if filled == capacity:
                chunks.append(Chunk(sources, targets, filled))
                sources, targets, filled = [], [], 0
    if sources:
        chunks.append(Chunk(sources, targets, filled))
    return chunks


def scatter(result: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
    """Copy ``result`` into ``targets``, one behind the other."""
    if len(targets) == 1:
        targets[0].copy_(result)
    else:
        copy_all(targets, result.split([target.numel() for target in targets]))


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its target; they may differ in element type."""
    torch._foreach_copy_(list(targets), list(sources))


def halves_exactly(dtype: torch.dtype, divisor: int) -> bool:
    """Dividing by ``divisor`` before or after a sum of this type is the same."""
    return dtype in _HALVED_EXACTLY and divisor & (divisor - 1) == 0
