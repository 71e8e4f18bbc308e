"""The callbacks of a fit that may begin amid an epoch. Importing this needs Keras."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from hvd_cluster.estimators.keras.callbacks import FitProgress


class StepsOfEpoch(keras.callbacks.CallbackList):  # type: ignore[misc,unused-ignore]
    """Tells callbacks which step of its epoch a batch is, also where the first epoch of the fit is begun amid it.

    Keras knows no such beginning: it counts from 0, and makes as many steps in this epoch as in others. So the steps
    are counted on here, and what ends the epoch is the flag by which callbacks stop a fit, taken back at once.
    """

    def __init__(self, callbacks: Sequence[Any], progress: FitProgress, model: Any) -> None:
        self._progress = progress
        self._steps = progress.batches.readers.train_steps
        #: Once the epoch has been ended here: whether a callback has stopped the fit.
        self._is_stopped: bool | None = None
        super().__init__(
            callbacks, add_history=True, model=model, verbose=0, epochs=progress.spec.epochs, steps=self._steps
        )

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Tell it."""
        super().on_train_batch_begin(self._progress.done + batch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Tell it, and end an epoch that was begun amid it."""
        batch += self._progress.done
        super().on_train_batch_end(batch, logs)
        if self._progress.done and batch + 1 >= self._steps:
            model = self.model
            self._is_stopped, model.stop_training = model.stop_training, True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Tell it; the next epoch is a whole one."""
        if self._is_stopped is not None:
            self.model.stop_training, self._is_stopped = self._is_stopped, None
        super().on_epoch_end(epoch, logs)
        self._progress.done = 0
