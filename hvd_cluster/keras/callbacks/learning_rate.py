"""Learning rates that depend on the epoch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
from keras.src.utils import io_utils

from hvd_cluster.engine import basics


class LearningRateScheduleCallback(keras.callbacks.Callback):  # type: ignore[misc,unused-ignore]
    """Multiplies an initial learning rate by a function of the epoch.

    It writes the rate to ``logs["lr"]``.

    Args:
        initial_lr: the initial rate.
        multiplier: a number, raised to the power ``epoch - start_epoch`` as in Horovod, so that 0.1 decays the rate
            in each epoch and leaves it unchanged in ``start_epoch``; or a function of the epoch, which is fractional
            if ``staircase`` is False: ``lambda epoch: 0.1`` for one rate from ``start_epoch`` to ``end_epoch``.
        start_epoch: the first epoch in which the callback sets the rate.
        end_epoch: the epoch before which it stops; None for no end.
        staircase: change the rate only at the start of an epoch instead of at every batch.
        momentum_correction: scale the optimizer's velocity with the rate when that changes, as in "Accurate, Large
            Minibatch SGD" (Goyal et al. 2017), section 2.1, for SGD and RMSprop, whose velocity includes the rate.
        steps_per_epoch: batches per epoch; required if ``staircase`` is False and ``model.fit`` does not know the
            number.

    Raises:
        ValueError: ``initial_lr`` is None.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError("Parameter `initial_lr` is required")
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0
        self.multiplier: Callable[[float], float] = (
            multiplier if callable(multiplier) else lambda epoch: multiplier ** (epoch - start_epoch)
        )

    def on_train_begin(self, logs: Any = None) -> None:
        """Determine the number of batches per epoch.

        Raises:
            ValueError: it is unknown.
        """
        if self.staircase or self.steps_per_epoch:
            return
        self.steps_per_epoch = (self.params or {}).get("steps")
        if not self.steps_per_epoch:
            raise ValueError(
                "Could not autodetect the number of steps per epoch. Please specify the steps_per_epoch parameter to "
                f"the {type(self).__name__}() or upgrade Keras to a version that reports it."
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Store the epoch."""
        self.current_epoch = epoch

    def on_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the rate for the batch."""
        epoch = self.current_epoch
        if epoch < self.start_epoch or (self.end_epoch is not None and epoch >= self.end_epoch):
            return
        if self.staircase:
            if batch == 0:
                self._set(self.initial_lr * self.multiplier(epoch))
        else:
            self._set(self.initial_lr * self.multiplier(epoch + batch / float(self.steps_per_epoch or 1)))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Report the rate."""
        if logs is not None:
            logs["lr"] = self._rate()

    def _rate(self) -> float:
        if hasattr(self.model, "jax_state_sync"):
            self.model.jax_state_sync()
        return float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))

    def _set(self, rate: float) -> None:
        before, optimizer = self._rate(), self.model.optimizer
        if rate == before:
            return
        optimizer.learning_rate = rate
        optimizer = getattr(optimizer, "inner_optimizer", optimizer)  # LossScaleOptimizer has no velocities
        holds_rate = isinstance(optimizer, (keras.optimizers.SGD, keras.optimizers.RMSprop))  # in the velocity
        if self.momentum_correction and before and holds_rate and optimizer.momentum:
            for velocity in getattr(optimizer, "momentums", None) or getattr(optimizer, "_momentums", []):
                if velocity is not None:  # variables with overwrite_with_gradient have none
                    velocity.assign(velocity * (rate / before))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate over the first epochs, batch by batch.

    It begins with ``initial_lr / size`` and ends with ``initial_lr``.

    Args:
        initial_lr: the final rate, already scaled by the number of ranks.
        warmup_epochs: the number of epochs.
        momentum_correction: as for :class:`LearningRateScheduleCallback`.
        steps_per_epoch: as for :class:`LearningRateScheduleCallback`.
        verbose: 1 prints the final rate on rank 0, as Keras's callbacks do.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            # The last batch of the warm-up gets the full rate.
            epoch += 1.0 / float(self.steps_per_epoch or 1)
            size = basics.size()
            return 1.0 / size * (epoch * (size - 1) / warmup_epochs + 1)

        super().__init__(
            initial_lr,
            multiplier,
            start_epoch=0,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Report the rate; print it when the warm-up ends."""
        super().on_epoch_end(epoch, logs)
        if epoch + 1 == self.end_epoch and self.verbose > 0 and basics.rank() == 0:
            io_utils.print_msg(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {self._rate():g}.")
