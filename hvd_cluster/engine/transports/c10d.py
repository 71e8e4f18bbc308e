"""What Gloo's and NCCL's process groups take alike: torch's names of the reductions, and the element types they add."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from hvd_cluster.engine.request import ReduceOp

REDUCE_OPS: dict[ReduceOp, Any] = {
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.MAX: dist.ReduceOp.MAX,
    ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
}
REDUCED_DTYPES = frozenset(
    {
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.int64,
    }
)
