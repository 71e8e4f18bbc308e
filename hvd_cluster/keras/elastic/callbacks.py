"""Callbacks that update an elastic state while ``model.fit`` runs."""

from __future__ import annotations

from typing import Any

import keras

from hvd_cluster.elastic.state import State


class CommitStateCallback(keras.callbacks.Callback):  # type: ignore[misc,unused-ignore]
    """Commits the state every few batches and at the end of each epoch.

    List it after the other two. The last batch of an epoch is committed together with the epoch: a state committed
    between the two would repeat the epoch when it is resumed.

    Args:
        state: the state to commit.
        batches_per_commit: the number of batches between commits; a commit copies the model.
    """

    def __init__(self, state: State, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state = state
        self.batches_per_commit = batches_per_commit
        self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs: Any = None) -> None:
        """Reset the counter: all ranks start together."""
        self.batches_remaining = self.batches_per_commit

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        """Commit after every ``batches_per_commit`` batches.

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
    """The value of ``model.stop_training`` while an epoch ends early.

    It is truthy, but distinct from True.
    """


class UpdateBatchStateCallback(keras.callbacks.Callback):  # type: ignore[misc,unused-ignore]
    """Updates ``state.batch``, and shortens a resumed epoch.

    ``state.batch`` is the number of finished batches of the epoch. If a fit starts with ``state.batch`` > 0, its first
    epoch is shorter by that many batches, but at least one batch long; so always pass whole epochs to ``model.fit``.
    The epoch uses the first batches of the data: start the data at the remaining batches, unless they are drawn at
    random; with ``steps_per_epoch``, use infinite data. If Keras does not know the number of batches per epoch (a
    generator without ``steps_per_epoch``), an epoch is as long as its data.

    The batches are those of one worker, and ``state.batch`` stays the same when the number of workers changes. If the
    batches per epoch depend on the number of workers, convert ``state.batch`` in a reset callback.

    Args:
        state: an object state with an attribute ``batch``.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self._done_before = 0
        self._end = _EndOfEpoch()

    def on_train_begin(self, logs: Any = None) -> None:
        """Start the first epoch of the fit at the state's batch."""
        self._done_before = self.state.batch

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count the batch, and end a resumed epoch after its last batch."""
        self.state.batch = self._done_before + batch + 1
        steps = (self.params or {}).get("steps")
        if self._done_before and steps and self.state.batch >= steps and not self.model.stop_training:
            self.model.stop_training = self._end

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Reset the count for the next epoch.

        Training continues unless another callback stopped it.
        """
        if self.model.stop_training is self._end:
            self.model.stop_training = False
        self.state.batch = self._done_before = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):  # type: ignore[misc,unused-ignore]
    """Updates ``state.epoch``, the number of finished epochs of all fits.

    It counts over all calls of ``model.fit``.

    Args:
        state: an object state with an attribute ``epoch``.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Count the epoch.

        Keras's own epoch number depends on the fit's ``initial_epoch``.
        """
        self.state.epoch += 1
