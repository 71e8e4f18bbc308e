"""Horovod's Keras API: ``import hvd_cluster.keras as hvd``.

For Keras 3 on TensorFlow, torch or JAX.
"""

from __future__ import annotations

from importlib.util import find_spec

from hvd_cluster.errors import MissingExtraError

if find_spec("keras") is None:
    raise MissingExtraError("keras", "tensorflow", "by hvd_cluster.keras")

from hvd_cluster.engine import basics, process_sets
from hvd_cluster.engine.basics import *
from hvd_cluster.engine.process_sets import *
from hvd_cluster.engine.signature import ReduceOp
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
    "Product",
    "RanksDisagreeError",
    "Sum",
    "WorldEndedError",
    "allgather",
    "allgather_object",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "elastic",
    "join",
    "load_model",
    "reducescatter",
]
__all__ += basics.__all__
__all__ += process_sets.__all__
__all__.sort()
