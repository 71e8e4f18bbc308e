"""Gradients on Keras's torch backend."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvd_cluster.engine.submission import Present
from hvd_cluster.keras.reduction.reducer import Reduction
from hvd_cluster.torch.submission import checked


class TorchReduction(Reduction):
    """Reduction by the engine, without conversion."""

    def reduce(
        self,
        tensors: Sequence[torch.Tensor],
        groups: list[list[int]],
        held: Present | None = None,
        *,
        ends_step: bool = False,
    ) -> list[torch.Tensor]:
        """Reduce ``tensors``; returns new tensors."""
        del ends_step  # the optimizer, which runs as Python, ends it
        with torch.no_grad():
            return self.reduce_torch(checked(tensor.detach().contiguous() for tensor in tensors), groups, held)

    @property
    def is_eager(self) -> bool:
        """Always: where torch compiles a step, it leaves this to Python."""
        return True
