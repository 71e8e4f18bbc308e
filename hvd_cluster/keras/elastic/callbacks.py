"""Callbacks that keep an elastic state while ``model.fit`` runs."""

from __future__ import annotations

from typing import Any

import keras

from hvd_cluster.elastic.state import State


class CommitStateCallback(keras.callbacks.Callback):  # type: ignore[misc,unused-ignore]
    """Commits the state every ``batches_per_commit`` batches and at the end of each epoch. List it after the other two.

    The last batch of an epoch is committed with its epoch, so that no state stands between the two: one that is taken
    up there would begin the epoch again.

    Args:
        state: what is committed.
        batches_per_commit: how often; a commit copies the model.
    """

    def __init__(self, state: State, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state = state
        self.batches_per_commit = batches_per_commit
        self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs: Any = None) -> None:
        """Reset the count: all ranks begin together."""
        self.batches_remaining = self.batches_per_commit

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        """Commit, if it is time to.

        Raises:
            HostsUpdatedInterrupt: the hosts have changed.
        """
        self.batches_remaining -= 1
        if self.batches_remaining == 0:
            self.batches_remaining = self.batches_per_commit
            is_last = batch + 1 == (self.params or {}).get("steps") or self.model.stop_training
            if not is_last:
                self.state.commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Commit.

        Raises:
            HostsUpdatedInterrupt: the hosts have changed.
        """
        self.state.commit()


class _EndOfEpoch:
    """What ``model.stop_training`` holds while an epoch ends early: true, and told from another callback's True."""


class UpdateBatchStateCallback(keras.callbacks.Callback):  # type: ignore[misc,unused-ignore]
    """Keeps ``state.batch``, the number of batches of the epoch that are done, and shortens an epoch that is resumed.

    The first epoch of a fit that begins with ``state.batch`` > 0 ends as many batches earlier, at least one batch long;
    so ``model.fit`` is given whole epochs, always. It takes the first batches that its data give: let those be the ones
    that are still to come, or any where they are drawn at random; with ``steps_per_epoch`` data that do not end. Where
    Keras does not know how many batches an epoch has (a generator without ``steps_per_epoch``), an epoch is as long as
    its data.

    Args:
        state: an object state with an attribute ``batch``.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self._done_before = 0
        self._end = _EndOfEpoch()

    def on_train_begin(self, logs: Any = None) -> None:
        """The first epoch of a fit continues where the state is."""
        self._done_before = self.state.batch

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        """One more batch is done, perhaps the last one of a resumed epoch."""
        self.state.batch = self._done_before + batch + 1
        steps = (self.params or {}).get("steps")
        if self._done_before and steps and self.state.batch >= steps and not self.model.stop_training:
            self.model.stop_training = self._end

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """The next epoch begins at its first batch; training continues unless something else has stopped it."""
        if self.model.stop_training is self._end:
            self.model.stop_training = False
        self.state.batch = self._done_before = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):  # type: ignore[misc,unused-ignore]
    """Keeps ``state.epoch``, the number of epochs that are done in all calls of ``model.fit`` together.

    Args:
        state: an object state with an attribute ``epoch``.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """One more epoch is done; Keras's own number of it depends on the ``initial_epoch`` of the fit."""
        self.state.epoch += 1
