"""The strategies of ``communication=``.

Ranks train apart in rounds, or exchange approximate gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hvd_cluster.estimators.lightning.shard_strategy import ShardStrategy
from hvd_cluster.estimators.torch.strategies.low_rank import LowRankGradients
from hvd_cluster.estimators.torch.strategies.rounds import rounds_of
from hvd_cluster.lightning.optimizers import move_schedulers


class RoundsStrategy(ShardStrategy):
    """The strategy of ranks that train apart in rounds.

    Weights become equal at the end of a round, before a validation and for a checkpoint.
    """

    def _replace(self, optimizers: Sequence[Any]) -> None:
        self.optimizers = [rounds_of(self._run.spec.communication, one, self.global_rank) for one in optimizers]
        for before, after in zip(optimizers, self.optimizers, strict=True):
            move_schedulers(self._schedulers(), before, after)

    def equalize(self) -> None:
        """End the round; every rank takes part."""
        for optimizer in self.optimizers:
            optimizer.exchange.end()

    def on_validation_start(self) -> None:
        """End the round, and broadcast the buffers of rank 0."""
        self.equalize()
        super().on_validation_start()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The state after the end of the round; every rank takes part."""
        self.equalize()
        return super().lightning_module_state_dict()


class LowRankStrategy(ShardStrategy):
    """The gradients of a step are approximate means when its backward passes end."""

    _accumulates = False

    def _replace(self, optimizers: Sequence[Any]) -> None:
        self.optimizers = list(optimizers)
        for optimizer in self.optimizers:
            parameters = [one for group in optimizer.param_groups for one in group["params"]]
            optimizer.exchange = LowRankGradients(self._run.spec.communication, parameters, self.global_rank)

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        """Reduce the gradients, unless further backward passes of the step follow."""
        super().post_backward(closure_loss)
        if not self._accumulates:
            for optimizer in self.optimizers:
                optimizer.exchange.reduce()

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Inside, the gradients of backward passes are accumulated on this rank only."""
        self._accumulates = True
        try:
            yield
        finally:
            self._accumulates = False
