"""Horovod's torch API: ``import hvd_cluster.torch as hvd``."""

from __future__ import annotations

from hvd_cluster.engine import basics, process_sets
from hvd_cluster.engine.basics import *
from hvd_cluster.engine.process_sets import *
from hvd_cluster.errors import (
    GradientChangedError,
    HorovodInternalError,
    JoinUnsupportedError,
    RanksDisagreeError,
    WorldEndedError,
)
from hvd_cluster.torch import distributed, elastic, ops
from hvd_cluster.torch.compression import Compression
from hvd_cluster.torch.distributed.ddp_hook import shared_bucket_hook
from hvd_cluster.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from hvd_cluster.torch.ops import *
from hvd_cluster.torch.optimizer import DistributedOptimizer
from hvd_cluster.torch.shared import is_shared, shared_empty
from hvd_cluster.torch.sync_batch_norm import SyncBatchNorm

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "GradientChangedError",
    "HorovodInternalError",
    "JoinUnsupportedError",
    "RanksDisagreeError",
    "SyncBatchNorm",
    "WorldEndedError",
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "elastic",
    "is_shared",
    "shared_bucket_hook",
    "shared_empty",
]
__all__ += basics.__all__
__all__ += process_sets.__all__
__all__ += ops.__all__
__all__.sort()

distributed.register()
