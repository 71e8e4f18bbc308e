"""A fit that a callback stops on one rank stops on all of them. Importing this needs Keras."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import torch

from hvd_cluster.estimators.run.world import Collectives

#: Where a callback may set ``model.stop_training`` so that Keras ends the fit amid an epoch.
_HOOKS = (
    "on_train_begin",
    "on_epoch_begin",
    "on_train_batch_begin",
    "on_train_batch_end",
    "on_batch_begin",
    "on_batch_end",
)
#: Keras's own that do, or call what the user has written; the others of its module and of ours do not.
_STOPPING = (keras.callbacks.TerminateOnNaN, keras.callbacks.LambdaCallback)


class StopsTogether(keras.callbacks.Callback):  # type: ignore[misc,unused-ignore]
    """Comes after the user's callbacks: one of them may stop the fit by what its own rank alone sees, such as a loss.

    That rank would leave, and the others would wait for it in the next step for ever. After an epoch the ranks always
    ask each other; after each step only where there is a callback that may stop the fit there.

    Args:
        callbacks: the user's, the same on all ranks.
        hvd: ``hvd_cluster.torch``.
    """

    def __init__(self, callbacks: Sequence[Any], hvd: Collectives) -> None:
        super().__init__()
        self._hvd = hvd
        self._asks_in_steps = any(_may_stop_within(callback) for callback in callbacks)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Ask, where it may be."""
        if self._asks_in_steps:
            self._agree()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Ask."""
        self._agree()

    def _agree(self) -> None:
        if self._hvd.size() > 1:
            mine = torch.tensor([int(self.model.stop_training)])
            stops = self._hvd.allreduce(mine, op=self._hvd.Max, name="hvd_cluster.keras.stop")
            self.model.stop_training = bool(stops.item())


def _may_stop_within(callback: Any) -> bool:
    if isinstance(callback, _STOPPING):
        return True
    if type(callback).__module__.startswith(("keras.", "hvd_cluster.")):
        return False
    hooks = (getattr(getattr(callback, name), "__func__", None) for name in _HOOKS)
    return any(hook is not getattr(keras.callbacks.Callback, name) for name, hook in zip(_HOOKS, hooks, strict=True))
