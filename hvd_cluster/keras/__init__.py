"""Horovod's Keras API, for Keras 3 on TensorFlow, torch or JAX: ``import hvd_cluster.keras as hvd``."""

from __future__ import annotations

from importlib.util import find_spec

from hvd_cluster.errors import MissingExtraError

if find_spec("keras") is None:
    raise MissingExtraError("keras", "tensorflow", "by hvd_cluster.keras")

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
from hvd_cluster.engine.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from hvd_cluster.engine.request import ReduceOp
from hvd_cluster.errors import HorovodInternalError, JoinUnsupportedError, RanksDisagreeError, WorldEndedError
from hvd_cluster.keras import callbacks, elastic
from hvd_cluster.keras.compression import Compression
from hvd_cluster.keras.models import load_model
from hvd_cluster.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer
from hvd_cluster.keras.values import (
    allgather,
    allreduce,
    broadcast,
    broadcast_global_variables,
    broadcast_variables,
    reducescatter,
)
from hvd_cluster.torch import allgather_object, barrier, broadcast_object, join

Average, Sum, Adasum, Min, Max, Product = ReduceOp

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "JoinUnsupportedError",
    "Max",
    "Min",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Product",
    "RanksDisagreeError",
    "Sum",
    "WorldEndedError",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "load_model",
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
