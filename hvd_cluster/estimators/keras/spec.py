"""What a worker must know to train with Keras. Unpickling it needs no Keras: its backend is to be chosen first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hvd_cluster.estimators.keras.data import KerasColumns
from hvd_cluster.estimators.keras.packed_model import PackedModel
from hvd_cluster.estimators.spec import FitSpec


@dataclass(frozen=True, kw_only=True)
class KerasSpec(FitSpec):
    """A Keras run, complete: :func:`hvd_cluster.estimators.keras.train.train` needs nothing else."""

    #: The compiled model.
    model: PackedModel
    columns: KerasColumns
    #: cloudpickle of :class:`hvd_cluster.estimators.keras.train.Extras`.
    extras: bytes = field(repr=False)
    #: Environment variables.
    backend_env: Mapping[str, str] = field(default_factory=dict)
    #: Batches that tf.data takes in advance; 0 lets it choose.
    prefetch: int = 0
