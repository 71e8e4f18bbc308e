"""Gradients on Keras's torch backend."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvd_cluster.keras.reduction.reducer import Reduction


class TorchReduction(Reduction):
    """Reduction by the engine, without conversion."""

    def reduce(self, tensors: Sequence[torch.Tensor], groups: list[list[int]]) -> list[torch.Tensor]:
        """Reduce ``tensors``; returns new tensors."""
        with torch.no_grad():
            return self.reduce_torch([tensor.detach().contiguous() for tensor in tensors], groups)
