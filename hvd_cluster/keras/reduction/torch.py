"""Gradients on Keras's torch backend."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvd_cluster.keras.reduction.reducer import Reduction


class TorchReduction(Reduction):
    """Torch tensors go to the engine as they are."""

    def reduce(self, tensors: Sequence[torch.Tensor], groups: list[list[int]]) -> list[torch.Tensor]:
        """Reduce ``tensors``; new ones come back."""
        with torch.no_grad():
            return self.reduce_torch([tensor.detach().contiguous() for tensor in tensors], groups)
