"""Horovod's MXNet API: ``import hvd_cluster.mxnet as hvd``.

For MXNet 1.9.1, its last release.
"""

from __future__ import annotations

try:
    import mxnet
except (ImportError, AttributeError) as error:  # AttributeError: it asks NumPy for names that 1.24 has dropped
    raise ImportError(
        f"hvd_cluster.mxnet needs mxnet 1.9.1, which imports beside numpy 1.23 only ({error}): see docs/mxnet.md"
    ) from error

from hvd_cluster.engine import basics, process_sets
from hvd_cluster.engine.basics import *
from hvd_cluster.engine.process_sets import *
from hvd_cluster.errors import HorovodInternalError, JoinUnsupportedError, RanksDisagreeError, WorldEndedError
from hvd_cluster.mxnet import ops
from hvd_cluster.mxnet.compression import Compression
from hvd_cluster.mxnet.functions import allgather_object, broadcast_object, broadcast_parameters
from hvd_cluster.mxnet.ops import *
from hvd_cluster.mxnet.optimizer import DistributedOptimizer
from hvd_cluster.mxnet.trainer import DistributedTrainer

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "DistributedTrainer",
    "HorovodInternalError",
    "JoinUnsupportedError",
    "RanksDisagreeError",
    "WorldEndedError",
    "allgather_object",
    "broadcast_object",
    "broadcast_parameters",
]
__all__ += basics.__all__
__all__ += process_sets.__all__
__all__ += ops.__all__
__all__.sort()

del mxnet
