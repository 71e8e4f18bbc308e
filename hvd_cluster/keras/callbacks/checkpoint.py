"""A checkpoint file of the best model."""

from __future__ import annotations

from typing import Any

import keras


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):  # type: ignore[misc,unused-ignore]
    """``keras.callbacks.ModelCheckpoint`` with ``save_best_only``.

    The estimator assigns its ``filepath``.

    Args:
        monitor: the metric that selects the best model.
        verbose: 1 reports every save.
        mode: "min", "max", or "auto" to choose by the metric's name.
        save_freq: "epoch", or a number of batches.
        save_weights_only: save only the weights, not the architecture.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        mode: str = "auto",
        save_freq: Any = "epoch",
        save_weights_only: bool = False,
    ) -> None:
        super().__init__(
            filepath="unassigned.weights.h5" if save_weights_only else "unassigned.keras",
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        self.filepath: Any = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Check that a path was assigned.

        Raises:
            ValueError: no path was assigned.
        """
        if self.filepath is None:
            raise ValueError(
                "BestModelCheckpoint has no filepath: assign one, or pass the callback to an estimator, which "
                "assigns one"
            )
        super().on_train_begin(logs)
