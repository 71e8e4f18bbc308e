"""Horovod's TensorFlow API: ``import hvd_cluster.tensorflow as hvd``."""

from __future__ import annotations

from importlib.util import find_spec

from hvd_cluster.errors import MissingExtraError

if find_spec("tensorflow") is None:
    raise MissingExtraError("tensorflow", "tensorflow", "by hvd_cluster.tensorflow")
if find_spec("keras") is None:
    raise MissingExtraError("keras", "tensorflow", "by hvd_cluster.tensorflow")

from hvd_cluster.engine import basics, process_sets
from hvd_cluster.engine.basics import *
from hvd_cluster.engine.process_sets import *
from hvd_cluster.errors import HorovodInternalError, JoinUnsupportedError, RanksDisagreeError, WorldEndedError
from hvd_cluster.tensorflow import elastic, ops
from hvd_cluster.tensorflow.compression import Compression
from hvd_cluster.tensorflow.functions import (
    BroadcastGlobalVariablesHook,
    allgather_object,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
)
from hvd_cluster.tensorflow.ops import *
from hvd_cluster.tensorflow.optimizer import DistributedOptimizer
from hvd_cluster.tensorflow.sync_batch_norm import SyncBatchNormalization
from hvd_cluster.tensorflow.tape import DistributedGradientTape, PartialDistributedGradientTape

__all__ = [
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "HorovodInternalError",
    "JoinUnsupportedError",
    "PartialDistributedGradientTape",
    "RanksDisagreeError",
    "SyncBatchNormalization",
    "WorldEndedError",
    "allgather_object",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "elastic",
]
__all__ += basics.__all__
__all__ += process_sets.__all__
__all__ += ops.__all__
__all__.sort()
