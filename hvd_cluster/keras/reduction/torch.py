"""Gradients on Keras's torch backend."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvd_cluster.keras.reduction.reducer import Reduction
from hvd_cluster.torch.submission import checked


class TorchReduction(Reduction):
    """Reduction by the engine, without conversion."""

    def reduce(self, tensors: Sequence[torch.Tensor], groups: list[list[int]]) -> list[torch.Tensor]:
        """Reduce ``tensors``; returns new tensors."""
        with torch.no_grad():
            return self.reduce_torch(checked(tensor.detach().contiguous() for tensor in tensors), groups)
