"""torch's names of the reductions, for the process groups of Gloo and NCCL."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from hvd_cluster.engine.request import ReduceOp

REDUCE_OPS: dict[ReduceOp, Any] = {
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.MAX: dist.ReduceOp.MAX,
    ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
}
