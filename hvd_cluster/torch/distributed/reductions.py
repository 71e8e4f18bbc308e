"""torch's reductions in terms of the engine's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hvd_cluster.engine.request import REDUCED_DTYPES
from hvd_cluster.engine.signature import ReduceOp


class ScaledOp(NamedTuple):
    """How the engine computes one of torch's reductions."""

    op: ReduceOp
    #: By which this rank multiplies what it gives; each rank may have its own.
    factor: float = 1.0

    def scaled(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """What this rank gives: ``tensors`` of real numbers times the factor."""
        if self.factor == 1.0:
            return tensors
        wide = [tensor if tensor.is_floating_point() else tensor.double() for tensor in tensors]
        return [each.mul(self.factor).to(tensor.dtype) for each, tensor in zip(wide, tensors, strict=True)]


_PLAIN: dict[Any, ScaledOp] = {
    dist.ReduceOp.SUM: ScaledOp(ReduceOp.SUM),
    dist.ReduceOp.AVG: ScaledOp(ReduceOp.AVERAGE),
    dist.ReduceOp.PRODUCT: ScaledOp(ReduceOp.PRODUCT),
    dist.ReduceOp.MIN: ScaledOp(ReduceOp.MIN),
    dist.ReduceOp.MAX: ScaledOp(ReduceOp.MAX),
}
#: The engine does not have these: their operands are gathered.
_BITWISE: dict[Any, Callable[..., torch.Tensor]] = {
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}
#: Those that add complex numbers as they add their parts.
_ADDING = (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.PREMUL_SUM)


def reduction_of(op: Any, dtype: torch.dtype) -> ScaledOp | Callable[..., torch.Tensor]:
    """The engine's reduction for torch's ``op``; for a bitwise one, a function.

    The function combines two operands.

    Raises:
        ValueError: the elements cannot be reduced that way.
    """
    kind = _kind_of(op)
    if kind in _BITWISE:
        if dtype.is_floating_point or dtype.is_complex:
            raise ValueError(f"Cannot use {kind.name} with non-integral dtype {dtype}")
        return _BITWISE[kind]
    if dtype not in REDUCED_DTYPES and not (dtype.is_complex and kind in _ADDING):
        raise ValueError(f"Cannot use {kind} with {dtype} and the backend hvd")
    if kind == dist.ReduceOp.PREMUL_SUM:
        factor = op.factor if hasattr(op, "factor") else op.__getstate__()[1]
        return ScaledOp(ReduceOp.SUM, float(factor))
    if kind not in _PLAIN:
        raise ValueError(f"Cannot use {op} with the backend hvd")
    if kind == dist.ReduceOp.AVG and dtype == torch.bool:
        raise ValueError("Cannot use ReduceOp.AVG with Bool")
    return _PLAIN[kind]


def _kind_of(op: Any) -> Any:
    """The plain enumerator of torch, of which ``op`` may be a copy with a factor."""
    return next((kind for kind in (*_PLAIN, *_BITWISE, dist.ReduceOp.PREMUL_SUM) if op == kind), op)
