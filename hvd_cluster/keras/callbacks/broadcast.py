"""Equal weights on all ranks at the start of a training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from hvd_cluster.elastic.keras_model import model_variables
from hvd_cluster.keras.values import broadcast_variables


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):  # type: ignore[misc,unused-ignore]
    """Overwrites the weights of the model and the state of its optimizer with those of one rank.

    It does so before the first batch where the model is built by then, as in ``model.fit`` it is, else behind it.

    Args:
        root_rank: the global rank whose values all get.
        device: accepted, and without effect.
        local_variables: variables that every rank keeps to itself.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Sequence[Any] | None = None) -> None:
        super().__init__()
        del device
        self.root_rank = root_rank
        self.broadcast_done = False
        self._local = {id(variable): variable for variable in local_variables or ()}

    def register_local_var(self, var: Any) -> None:
        """Leave a variable to each rank."""
        self._local[id(var)] = var

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcast, if the model is built: then so can be its optimizer."""
        optimizer = self.model.optimizer
        if not self.model.built:
            return
        if optimizer is not None and not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcast what was not there before."""
        self._broadcast()

    def _broadcast(self) -> None:
        if self.broadcast_done:
            return
        shared = [variable for variable in model_variables(self.model) if id(variable) not in self._local]
        broadcast_variables(shared, self.root_rank)
        self.broadcast_done = True
