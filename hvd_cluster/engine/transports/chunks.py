"""Tensors in shared memory: in chunks scaled and converted on the way in and out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from hvd_cluster.engine.buffers import flat
from hvd_cluster.engine.scaling import HALVES, Factors, copy_scaled
from hvd_cluster.engine.signature import ReduceOp

REDUCE: dict[ReduceOp, Callable[..., Any]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.PRODUCT: torch.mul,
}
#: Halving is exact in these types, except for the very smallest numbers.
_HALVED_EXACTLY = frozenset({torch.float32, torch.float64, torch.bfloat16})
#: This many halves are added in float32 at once: the sums stay in the cache, and the cost of the calls is small.
_HALVES_AT_ONCE = 1 << 17


class Chunk(NamedTuple):
    """Runs of elements that pass through a slot together, one after the other."""

    sources: list[torch.Tensor]
    targets: list[torch.Tensor]
    length: int


class Scratch:
    """Private memory of a transport, kept for its next reduction."""

    def __init__(self) -> None:
        self._kept: dict[torch.dtype, torch.Tensor] = {}

    def take(self, dtype: torch.dtype, length: int) -> torch.Tensor:
        """``length`` undefined elements; the same memory for each call with this type."""
        kept = self._kept.get(dtype)
        if kept is None or kept.numel() < length:
            kept = self._kept[dtype] = torch.empty(length, dtype=dtype, device="cpu")
        return kept[:length]


class Arithmetic(NamedTuple):
    """How the elements are scaled, converted and reduced."""

    reduce: Callable[..., Any]
    #: Multiplies an element as it is copied into the type in which it travels.
    prescale: float
    #: Multiplies what the ranks of this host have reduced,
    factor: float
    #: and divides it in the same step.
    divisor: float
    #: The same for results that are copied into their tensors.
    postscale: float
    last_divisor: float
    #: The ranks of this host reduce in float32, and not in the type in which elements travel.
    in_float32: bool
    #: A power of two by which they divide first: float32 holds no larger numbers than bfloat16.
    headroom: float = 1.0

    @classmethod
    @lru_cache(maxsize=1024)
    def of(
        cls,
        op: ReduceOp,
        own: torch.dtype,
        wire: torch.dtype,
        prescale: float,
        postscale: float,
        divisor: int,
        num_ranks: int,
    ) -> Arithmetic:
        """The arithmetic among ranks of one host; arguments as for :meth:`Factors.of`."""
        factors = Factors.of(op, own, wire, prescale, postscale, divisor, num_ranks)
        # What makes a number smaller comes before it is rounded to a narrower type, which it may not fit.
        if own == wire or abs(factors.postscale) < 1.0:
            how = cls(REDUCE[op], factors.prescale, factors.postscale, divisor, 1.0, 1.0, False)
        else:
            how = cls(REDUCE[op], factors.prescale, 1.0, divisor, factors.postscale, 1.0, False)
        return how._early(own, wire)._accumulating(op, wire, num_ranks)

    @classmethod
    @lru_cache(maxsize=1024)
    def between_hosts(
        cls,
        op: ReduceOp,
        own: torch.dtype,
        wire: torch.dtype,
        prescale: float,
        postscale: float,
        divisor: int,
        num_ranks: int,
        num_here: int,
    ) -> Arithmetic:
        """The arithmetic in one of several hosts; another transport then reduces again.

        Args:
            op: the reduction.
            own: the element type of the tensors.
            wire: the element type in which they travel.
            prescale: multiplies before the reduction.
            postscale: multiplies after it.
            divisor: divides after it.
            num_ranks: how many ranks take part.
            num_here: how many of them are on this host.
        """
        factors = Factors.of(op, own, wire, prescale, postscale, divisor, num_ranks)
        early, here = factors.prescale, (1.0, factors.headroom)
        last = (factors.postscale, divisor / factors.headroom)
        if num_here == 1 or wire == torch.bfloat16:  # nothing is reduced here, or float32 does not help
            early, here = early / factors.headroom, (1.0, 1.0)
        arithmetic = cls(REDUCE[op], early, *here, *last, False)
        return arithmetic._early(own, wire)._accumulating(op, wire, num_here)

    def _early(self, own: torch.dtype, wire: torch.dtype) -> Arithmetic:
        """Divide before the sum, while elements are copied in, if the bits stay the same.

        Only dividing by a power of two gives the same bits as dividing the sum. If elements are converted while they
        are copied in, dividing there would cost more.
        """
        divisor = self.divisor * self.last_divisor
        if own == wire and divisor > 1 and halves_exactly(wire, divisor):
            return self._replace(prescale=self.prescale / divisor, divisor=1.0, last_divisor=1.0)
        return self

    def _accumulating(self, op: ReduceOp, wire: torch.dtype, num_operands: int) -> Arithmetic:
        """The same with halves added, or multiplied, in float32 if this gives other bits."""
        if wire not in HALVES or op in (ReduceOp.MIN, ReduceOp.MAX):
            return self
        if wire == torch.bfloat16 and op == ReduceOp.SUM and (self.divisor != 1.0 or abs(self.factor) < 1.0):
            room = float(1 << (num_operands - 1).bit_length())
            return self._replace(in_float32=True, headroom=room, divisor=self.divisor / room)
        is_rounded_once = num_operands <= 2 and self.factor == 1.0 and halves_exactly(wire, self.divisor)
        return self if is_rounded_once else self._replace(in_float32=True)

    def fill(self, slot: torch.Tensor, sources: Sequence[torch.Tensor]) -> None:
        """``slot = sources * prescale``, in the element type of ``slot``."""
        if self.prescale != 1.0 and slot.dtype != sources[0].dtype:
            # Scale before converting: the product may fit although the number does not.
            for place, source in zip(slot.split([source.numel() for source in sources]), sources, strict=True):
                copy_scaled(place, source, self.prescale)
        elif slot.dtype != sources[0].dtype:
            copy_all(slot.split([source.numel() for source in sources]), sources)
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

    def combine(self, operands: Sequence[torch.Tensor], result: torch.Tensor, scratch: Scratch) -> None:
        """Reduce and scale two or more operands into ``result``, maybe one of them."""
        if self.in_float32:
            self._accumulate(operands, result, scratch, 1.0)
            return
        first, second, *others = operands
        self.reduce(first, second, out=result)
        for other in others:
            self.reduce(result, other, out=result)
        self._finish(result)

    def combine_in_place(self, operands: Sequence[torch.Tensor], scratch: Scratch) -> None:
        """Reduce and scale all operands into the first; :meth:`fill` was not applied."""
        first, *others = operands
        if self.in_float32:
            self._accumulate(operands, first, scratch, self.prescale)
        elif self.prescale == 1.0:
            self.combine(operands, first, scratch)
        else:
            # A power of two: sums are divided by the number of ranks before they are added, as in a slot.
            first.mul_(self.prescale)
            for other in others:
                torch.add(first, other, alpha=self.prescale, out=first)
            self._finish(first)

    def _accumulate(
        self, operands: Sequence[torch.Tensor], result: torch.Tensor, scratch: Scratch, prescale: float
    ) -> None:
        """Reduce prescaled operands in float32 into ``result``, scaled and rounded once."""
        prescale /= self.headroom
        rows = scratch.take(torch.float32, 2 * min(result.numel(), _HALVES_AT_ONCE)).view(2, -1)
        for place, *pieces in zip(*(tensor.split(_HALVES_AT_ONCE) for tensor in (result, *operands)), strict=True):
            total, addend = rows[:, : place.numel()].unbind()
            for row, piece in zip((total, *[addend] * len(pieces)), pieces, strict=False):
                row.copy_(piece)
                if prescale != 1.0:
                    row.mul_(prescale)
                if row is addend:
                    self.reduce(total, addend, out=total)
            self._finish(total)
            place.copy_(total)

    def deliver(self, targets: Sequence[torch.Tensor]) -> None:
        """Scale what was copied into ``targets``."""
        if self.postscale != 1.0 or self.last_divisor != 1.0:
            for target in targets:
                copy_scaled(target, target, self.postscale, self.last_divisor)

    def _finish(self, result: torch.Tensor) -> None:
        if self.divisor != 1.0 and self.factor == 1.0 and halves_exactly(result.dtype, self.divisor):
            result.mul_(1.0 / self.divisor)
        elif self.factor != 1.0 or self.divisor != 1.0:
            copy_scaled(result, result, self.factor, self.divisor)


def chunks_of(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], capacity: int) -> list[Chunk]:
    """Split tensors into chunks of up to ``capacity`` elements; small ones share one."""
    chunks: list[Chunk] = []
    sources: list[torch.Tensor] = []
    targets: list[torch.Tensor] = []
    filled = 0
    for tensor, output in zip(inputs, outputs, strict=True):
        source = flat(tensor)
        target = source if output is tensor else flat(output)
        num_elements = source.numel()
        if num_elements > capacity:
            pieces = zip(source.split(capacity), target.split(capacity), strict=True)
            chunks += [Chunk([piece], [place], piece.numel()) for piece, place in pieces]
            continue
        if filled + num_elements > capacity:
            chunks.append(Chunk(sources, targets, filled))
            sources, targets, filled = [], [], 0
        if num_elements:
            sources.append(source)
            targets.append(target)
            filled += num_elements
    if sources:
        chunks.append(Chunk(sources, targets, filled))
    return chunks


def full_chunks_of(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], capacity: int) -> list[Chunk]:
    """Split tensors into chunks of ``capacity`` elements; the last may have fewer."""
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
    """Copy ``result`` into ``targets``, one after the other."""
    if len(targets) == 1:
        targets[0].copy_(result)
    else:
        copy_all(targets, result.split([target.numel() for target in targets]))


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its target; they may differ in element type."""
    torch._foreach_copy_(list(targets), list(sources))


def halves_exactly(dtype: torch.dtype, divisor: float) -> bool:
    """Dividing by ``divisor`` before or after a sum of this type is the same."""
    return divisor == 1.0 or (dtype in _HALVED_EXACTLY and math.frexp(divisor)[0] == 0.5)


def without_aliases(inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """``inputs``, or copies where writing an output would change an unread input.

    An operation in place may be given one tensor twice, or views that overlap.
    """
    if len(inputs) == 1 or not any(tensor is output for tensor, output in zip(inputs, outputs, strict=True)):
        return inputs
    spans = sorted((tensor.data_ptr(), tensor.nbytes) for tensor in inputs if tensor.numel())
    if all(start + num_bytes <= following for (start, num_bytes), (following, _) in pairwise(spans)):
        return inputs
    return [tensor.clone() for tensor in inputs]
