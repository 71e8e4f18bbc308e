"""All collectives and the reduction constants.

The implementations are in ``collectives/``.
"""

from __future__ import annotations

from hvd_cluster.engine.signature import ReduceOp
from hvd_cluster.tensorflow.collectives.allgather import allgather, grouped_allgather
from hvd_cluster.tensorflow.collectives.allreduce import allreduce, grouped_allreduce
from hvd_cluster.tensorflow.collectives.alltoall import alltoall
from hvd_cluster.tensorflow.collectives.barrier import barrier, join
from hvd_cluster.tensorflow.collectives.broadcast import broadcast, broadcast_, broadcast_variables
from hvd_cluster.tensorflow.collectives.reducescatter import grouped_reducescatter, reducescatter
from hvd_cluster.tensorflow.rank_ops import local_rank_op, local_size_op, process_set_included_op, rank_op, size_op

Average, Sum, Adasum, Min, Max, Product = ReduceOp

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_variables",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "join",
    "local_rank_op",
    "local_size_op",
    "process_set_included_op",
    "rank_op",
    "reducescatter",
    "size_op",
]
