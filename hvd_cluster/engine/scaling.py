"""The arithmetic around a reduction: prescale, reduce, postscale; an average divides by the number of ranks."""

from __future__ import annotations

import torch

from hvd_cluster.engine.request import ReduceOp

#: Element types that transports do not add, and the ones that are added instead.
_WIDER = {torch.int16: torch.int32, torch.bool: torch.uint8}
#: A mean of bytes is a byte; the sum that it is taken of may be none.
_BYTES = frozenset({torch.uint8, torch.int8})


def reduction_dtype(dtype: torch.dtype, op: ReduceOp) -> torch.dtype:
    """The element type in which tensors of ``dtype`` are reduced."""
    if op == ReduceOp.AVERAGE and dtype in _BYTES:
        return torch.int32
    return _WIDER.get(dtype, dtype)


def reduction_op(op: ReduceOp, dtype: torch.dtype) -> ReduceOp:
    """What a transport has to do for ``op``. A sum of bools is true where any is, so it must not overflow a byte."""
    if dtype == torch.bool:
        return ReduceOp.MAX if op in (ReduceOp.SUM, ReduceOp.MAX) else ReduceOp.MIN
    return ReduceOp.SUM if op == ReduceOp.AVERAGE else op


def copy_scaled(target: torch.Tensor, source: torch.Tensor, factor: float) -> None:
    """``target = source * factor``, in the element type of ``target``; they may be the same memory.

    Integers are scaled in float64 and truncated. Halves on the CPU are scaled in float32 and rounded once, which
    is what torch does for a product with a Python number.
    """
    if factor == 1.0:
        if target.data_ptr() != source.data_ptr():
            target.copy_(source)
    elif target.is_floating_point():
        if target.dtype == source.dtype and target.device == source.device:
            torch.mul(source, factor, out=target)
        else:
            target.copy_(source).mul_(factor)
    else:
        target.copy_((source.double() * factor).trunc_())


def finish_scaled(target: torch.Tensor, source: torch.Tensor, factor: float, divisor: int) -> None:
    """``target = source * factor / divisor``; they may be the same memory."""
    if divisor == 1:
        copy_scaled(target, source, factor)
    elif target.is_floating_point():
        copy_scaled(target, source, factor)
        target.div_(divisor)
    else:
        target.copy_((source.double() * factor / divisor).trunc_())
