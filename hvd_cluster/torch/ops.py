"""All collectives and reduction constants; implemented in ``collectives/``.

Names follow Horovod: ranks match a request named "foo" as "allreduce.foo", and an unnamed request by its number among
the unnamed ones.
"""

from __future__ import annotations

from hvd_cluster.engine.signature import ReduceOp
from hvd_cluster.torch.collectives.allgather import (
    allgather,
    allgather_async,
    grouped_allgather,
    grouped_allgather_async,
)
from hvd_cluster.torch.collectives.allreduce import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
)
from hvd_cluster.torch.collectives.alltoall import alltoall, alltoall_async
from hvd_cluster.torch.collectives.barrier import barrier, join
from hvd_cluster.torch.collectives.broadcast import broadcast, broadcast_, broadcast_async, broadcast_async_
from hvd_cluster.torch.collectives.reducescatter import (
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from hvd_cluster.torch.collectives.sparse import sparse_allreduce_async
from hvd_cluster.torch.submission import poll, synchronize

Average, Sum, Adasum, Min, Max, Product = ReduceOp

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "sparse_allreduce_async",
    "synchronize",
]
