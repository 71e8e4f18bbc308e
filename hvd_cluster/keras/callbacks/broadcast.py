"""The broadcast of the weights at the start of training."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import keras

from hvd_cluster.elastic.keras_model import model_variables
from hvd_cluster.keras.gradient_accumulation import without_accumulators
from hvd_cluster.keras.values import broadcast_variables


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):  # type: ignore[misc,unused-ignore]
    """Overwrites the weights and the optimizer's state with those of one rank.

    The broadcast happens at the end of the first batch, in :meth:`on_batch_end`, so it includes what other callbacks
    restored on the root, and a subclass may choose the local variables there. A built model is also broadcast before
    the first batch, so that its gradients belong to equal weights; but not if :meth:`on_batch_end` is overridden or
    replaced, since that method decides what is broadcast.

    Args:
        root_rank: the global rank whose values are broadcast.
        device: accepted and ignored.
        local_variables: variables that are not broadcast, nor what the optimizer keeps for them, such as a momentum.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Sequence[Any] | None = None) -> None:
        super().__init__()
        del device
        self.root_rank = root_rank
        #: Whether :meth:`on_batch_end` has broadcast.
        self.broadcast_done = False
        self._is_first_batch = True
        self._local = {id(variable): variable for variable in local_variables or ()}

    def register_local_var(self, var: Any) -> None:
        """Exclude a variable from the broadcast, and what the optimizer keeps for it."""
        self._local[id(var)] = var

    def on_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Broadcast before the first batch if the model is built.

        All ``on_train_begin`` callbacks have run by now.
        """
        is_first, self._is_first_batch = self._is_first_batch, False
        if not is_first or self.broadcast_done or not self.model.built or self._is_overridden():
            return
        optimizer = self.model.optimizer
        if optimizer is not None and not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        self._broadcast()

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcast after the first batch."""
        if self.broadcast_done:
            return
        self._broadcast()
        self.broadcast_done = True

    def _broadcast(self) -> None:
        excluded = self._local.keys() | _slots(self.model.optimizer, self._local.values())
        # The first batch may be a pass that only accumulates: each rank keeps its accumulated gradients.
        with without_accumulators(self.model.optimizer):
            shared = [variable for variable in model_variables(self.model) if id(variable) not in excluded]
        broadcast_variables(shared, self.root_rank)

    def _is_overridden(self) -> bool:
        """Whether a method that Keras calls after a batch was replaced.

        A subclass or the program may have done so.
        """
        return any(getattr(getattr(self, name), "__func__", None) is not method for name, method in _AFTER_BATCH)


def _slots(optimizer: Any, variables: Collection[Any]) -> set[int]:
    """The ``id`` of what an optimizer, or None, keeps for ``variables``.

    Those are the entries of lists with one for each weight.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    members = [] if inner is None else getattr(inner, "optimizers", [inner])  # a MultiOptimizer has several
    found: set[int] = set()
    for member in members if variables else []:
        indices = member._trainable_variables_indices
        positions = [indices[key] for variable in variables if (key := member._var_key(variable)) in indices]
        for name, values in vars(member).items():
            if name != "_variables" and isinstance(values, (list, tuple)) and len(values) == len(indices):
                found.update(id(values[position]) for position in positions)
    return found


_AFTER_BATCH = tuple(
    (name, getattr(BroadcastGlobalVariablesCallback, name)) for name in ("on_batch_end", "on_train_batch_end")
)
