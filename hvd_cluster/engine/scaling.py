"""The arithmetic of reductions: element types, and where factors are applied.

A sum or an average is linear, so its factors can be combined if a 16-bit number would overflow in between.
``docs/concepts.md`` describes the guarantees for each element type.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from hvd_cluster.engine.buffers import flat
from hvd_cluster.engine.signature import ReduceOp

#: Added in float32 wherever this package adds them itself; Gloo and NCCL add them in their own type.
HALVES = frozenset({torch.float16, torch.bfloat16})
_LINEAR = frozenset({ReduceOp.SUM, ReduceOp.AVERAGE})
#: Integers whose sum over any number of ranks fits int32. Transports do not add int16 at all.
_SHORT = frozenset({torch.uint8, torch.int8, torch.int16})
#: How many elements are converted at once.
_PIECE_ELEMENTS = 1 << 20


class Factors(NamedTuple):
    """The factors and divisors of a reduction, and when they are applied."""

    #: Multiplies an element when it is copied into the type in which it travels.
    prescale: float = 1.0
    #: Multiplies the reduced element.
    postscale: float = 1.0
    #: Divides it in the same step: there is one rounding.
    divisor: float = 1.0
    #: A power of two. A transport that adds halves divides by it before the sum, and by that much less afterwards: then
    #: a sum overflows only if its result does, and only the smallest numbers are rounded.
    headroom: float = 1.0

    @classmethod
    def of(
        cls,
        op: ReduceOp,
        own: torch.dtype,
        wire: torch.dtype,
        prescale: float,
        postscale: float,
        divisor: int,
        num_ranks: int,
    ) -> Factors:
        """The factors of one reduction.

        Args:
            op: the reduction.
            own: the element type of the tensors.
            wire: the element type in which they travel.
            prescale: multiplies before the reduction.
            postscale: multiplies after it.
            divisor: divides after it: the number of ranks for an average, else 1.
            num_ranks: how many ranks take part.
        """
        if wire not in HALVES or op == ReduceOp.PRODUCT:
            return cls(prescale, postscale, divisor)
        if own != wire:
            # The prescale factor decides what fits the narrow type.
            early, late = prescale, postscale
        elif op in _LINEAR or prescale >= 0.0:
            early, late = 1.0, prescale * postscale
        else:  # the smallest element becomes the largest
            early, late = -1.0, -prescale * postscale
        shrinks = divisor > 1 or abs(late) < 1.0 or (own == wire and abs(prescale) < 1.0)
        headroom = float(1 << (num_ranks - 1).bit_length()) if op in _LINEAR and shrinks else 1.0
        return cls(early, late, divisor, headroom)


class Bucketing(NamedTuple):
    """How tensors of one type are packed into a bucket that is reduced as it is."""

    #: The element type of the bucket.
    dtype: torch.dtype
    #: The reduction of the transport: SUM, MIN, MAX or PRODUCT.
    op: ReduceOp
    factors: Factors
    #: An int64 travels as its quotient and its remainder by this number of ranks, because the sum of all ranks may not
    #: fit; 0 if it travels as it is.
    modulus: int = 0

    @classmethod
    @lru_cache(maxsize=1024)
    def of(
        cls,
        op: ReduceOp,
        own: torch.dtype,
        wire: torch.dtype,
        prescale: float,
        postscale: float,
        num_ranks: int,
    ) -> Bucketing:
        """How one reduction passes through a bucket; arguments as for :meth:`Factors.of`."""
        divisor = num_ranks if op == ReduceOp.AVERAGE else 1
        factors = Factors.of(op, own, wire, prescale, postscale, divisor, num_ranks)
        plain = ReduceOp.SUM if op == ReduceOp.AVERAGE else op
        if own.is_floating_point:
            return cls(wire, plain, factors)
        if own == torch.bool:
            # A sum of bools is true if any is true, so it must not overflow a byte.
            return cls(torch.uint8, ReduceOp.MAX if op in (ReduceOp.SUM, ReduceOp.MAX) else ReduceOp.MIN, factors)
        is_scaled = prescale != 1.0 or postscale != 1.0
        if not is_scaled and factors.divisor == 1:
            return cls(torch.int32 if own == torch.int16 else own, plain, factors)
        if own == torch.int64:
            is_wide = op in _LINEAR and num_ranks > 1 and (factors.divisor, postscale) != (1, 1.0)
            return cls(own, plain, factors, num_ranks if is_wide else 0)
        return cls(torch.int32 if own in _SHORT and not is_scaled else torch.int64, plain, factors)

    @property
    def num_places(self) -> int:
        """Elements of the bucket for each element of a tensor."""
        return 2 if self.modulus else 1

    def is_plain(self, own: torch.dtype) -> bool:
        """True if the bucket may be the tensor itself."""
        return self.dtype == own and not self.modulus

    def pack(self, piece: torch.Tensor, tensor: torch.Tensor) -> None:
        """Write a tensor into the bucket; they may be the same memory.

        Args:
            piece: the tensor's part of the bucket, of shape (num_places, ...) if :attr:`num_places` is not 1.
            tensor: the tensor to reduce.
        """
        if not self.modulus:
            copy_scaled(piece, tensor, self.factors.prescale / self.factors.headroom)
            return
        quotient, remainder = piece
        copy_scaled(quotient, tensor, self.factors.prescale)
        torch.remainder(quotient, self.modulus, out=remainder)
        quotient.div_(self.modulus, rounding_mode="floor")

    def unpack(self, output: torch.Tensor, piece: torch.Tensor) -> None:
        """Write the result for a tensor; the opposite of :meth:`pack`."""
        factors = self.factors
        if self.modulus:
            finish_divided(output, piece[0], piece[1], self.modulus, factors)
        else:
            copy_scaled(output, piece, factors.postscale, factors.divisor / factors.headroom)


def copy_scaled(target: torch.Tensor, source: torch.Tensor, factor: float = 1.0, divisor: float = 1.0) -> None:
    """Set ``target = source * factor / divisor``.

    Both are contiguous, and may be the same memory. Real numbers are computed in the wider of the two types, in float32
    at least, and rounded once. Integers are scaled in float64 and truncated; if they are only divided, the quotient is
    exact.
    """
    if factor == 1.0 and divisor == 1.0:
        if target.data_ptr() != source.data_ptr() or target.dtype != source.dtype:
            target.copy_(source)
    elif not target.is_floating_point():
        if factor == 1.0:
            target.copy_(torch.div(source.long(), int(divisor), rounding_mode="trunc"))
        else:  # through int64: what does not fit wraps around as in a sum
            target.copy_(_as_int64(source.double() * factor / divisor))
    else:
        # torch computes the product of a half and a Python number in float32.
        apply, number = (torch.div, divisor) if factor == 1.0 else (torch.mul, factor / divisor)
        wide = torch.promote_types(target.dtype, source.dtype)
        if target.dtype == source.dtype and target.device == source.device:
            apply(source, number, out=target)
        elif target.dtype == wide:
            apply(target.copy_(source), number, out=target)
        else:
            pieces = zip(flat(target).split(_PIECE_ELEMENTS), flat(source).split(_PIECE_ELEMENTS), strict=True)
            for place, piece in pieces:
                place.copy_(apply(piece.to(wide), number))


def finish_divided(
    target: torch.Tensor, quotients: torch.Tensor, remainders: torch.Tensor, modulus: int, factors: Factors
) -> None:
    """Set ``target = (quotients * modulus + remainders) * postscale / divisor``.

    The result is truncated. The sum in parentheses need not fit int64. A mean, where ``divisor`` is the modulus and the
    factor is 1, is exact.

    Args:
        target: int64, shape (...); may be one of the next two.
        quotients: int64, of the same shape.
        remainders: likewise, and not negative.
        modulus: what numbers were divided by, rounding down.
        factors: those of the reduction.
    """
    whole = quotients + torch.div(remainders, modulus, rounding_mode="floor")
    rest = torch.remainder(remainders, modulus)
    if factors.postscale == 1.0 and factors.divisor == modulus:
        # It is rounded down so far, but must be truncated.
        target.copy_(whole + ((whole < 0) & (rest > 0)))
    else:
        real = whole.double() * modulus + rest
        target.copy_(_as_int64(real * factors.postscale / factors.divisor))


def _as_int64(real: torch.Tensor) -> torch.Tensor:
    """Floats as int64, truncated; the largest int64 for 2**63, as floats round it."""
    return real.long().masked_fill_(real == 2.0**63, torch.iinfo(torch.int64).max)
