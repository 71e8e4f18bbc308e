"""Horovod's torch API: ``import hvd_cluster.torch as hvd``."""

from __future__ import annotations

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
from hvd_cluster.engine.process_sets import ProcessSet, global_process_set
from hvd_cluster.errors import HorovodInternalError
from hvd_cluster.torch.compression import Compression
from hvd_cluster.torch.ops import *  # noqa: F403
from hvd_cluster.torch.ops import __all__ as _ops
