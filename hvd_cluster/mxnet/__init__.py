"""Horovod's MXNet API, for MXNet 1.9.1, its last release: ``import hvd_cluster.mxnet as hvd``."""

from __future__ import annotations

try:
    import mxnet
except (ImportError, AttributeError) as error:  # AttributeError: it asks NumPy for names that 1.24 has dropped
    raise ImportError(
        f"hvd_cluster.mxnet needs mxnet 1.9.1, which imports beside numpy 1.23 only ({error}): see docs/mxnet.md"
    ) from error

from hvd_cluster.engine.basics import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from hvd_cluster.engine.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from hvd_cluster.errors import HorovodInternalError, JoinUnsupportedError, RanksDisagreeError, WorldEndedError
from hvd_cluster.mxnet.compression import Compression
from hvd_cluster.mxnet.functions import allgather_object, broadcast_object, broadcast_parameters
from hvd_cluster.mxnet.ops import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    allgather,
    allreduce,
    allreduce_,
    alltoall,
    barrier,
    broadcast,
    broadcast_,
    grouped_allgather,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_reducescatter,
    reducescatter,
)
from hvd_cluster.mxnet.optimizer import DistributedOptimizer
from hvd_cluster.mxnet.trainer import DistributedTrainer

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "DistributedTrainer",
    "HorovodInternalError",
    "JoinUnsupportedError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "RanksDisagreeError",
    "Sum",
    "WorldEndedError",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]

del mxnet
