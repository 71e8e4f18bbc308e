"""Elastic training with Keras: ``@hvd.elastic.run``, state and callbacks."""

from hvd_cluster.elastic.loop import run
from hvd_cluster.elastic.state import ObjectState, State
from hvd_cluster.keras.elastic.callbacks import (
    CommitStateCallback,
    UpdateBatchStateCallback,
    UpdateEpochStateCallback,
)
from hvd_cluster.keras.elastic.state import KerasState

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "ObjectState",
    "State",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]
