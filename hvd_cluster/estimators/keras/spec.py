"""What a worker must know to train with Keras.

Unpickling it does not import Keras: first the backend is chosen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hvd_cluster.estimators.keras.data import KerasColumns
from hvd_cluster.estimators.keras.packed_model import PackedModel
from hvd_cluster.estimators.spec import FitSpec


@dataclass(frozen=True, kw_only=True)
class KerasSpec(FitSpec):
    """A Keras run, all that :func:`hvd_cluster.estimators.keras.train.train` needs."""

    #: The compiled model.
    model: PackedModel
    columns: KerasColumns
    #: cloudpickle of :class:`Extras`.
    extras: bytes = field(repr=False)
    #: Environment variables.
    backend_env: Mapping[str, str] = field(default_factory=dict)
    #: Batches that tf.data reads ahead; 0 lets tf.data choose.
    prefetch: int = 0

    @property
    def trained_with(self) -> tuple[str, ...]:
        return ("keras", self.model.backend)


@dataclass(frozen=True)
class Extras:
    """The part of a spec whose unpickling imports Keras."""

    callbacks: tuple[Any, ...] = ()
    #: A ``ModelCheckpoint``, or None.
    checkpoint_callback: Any = None
    #: A compressor of ``hvd_cluster.keras``, or None.
    gradient_compression: Any = None
