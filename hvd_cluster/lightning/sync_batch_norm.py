"""``Trainer(sync_batchnorm=True)`` without torch.distributed."""

from __future__ import annotations

from typing import Any

import torch

import hvd_cluster.torch as hvd
from hvd_cluster.lightning.installed import submodule

_LayerSync: Any = submodule("plugins.layer_sync").LayerSync


class HorovodSyncBatchNorm(_LayerSync):
    """Computes batch normalization over the batches of all ranks during a fit."""

    def __init__(self) -> None:
        #: The replaced layers, by their path in the model.
        self._originals: dict[str, torch.nn.Module] = {}

    def apply(self, model: torch.nn.Module) -> torch.nn.Module:
        """The model with ``hvd.SyncBatchNorm`` in place of each batch normalization; weights and buffers stay."""
        layers = dict(model.named_modules(remove_duplicate=False))
        converted = hvd.SyncBatchNorm.convert_sync_batchnorm(model)
        replaced = dict(converted.named_modules(remove_duplicate=False))
        self._originals = {path: layer for path, layer in layers.items() if replaced[path] is not layer}
        return converted

    def revert(self, model: torch.nn.Module) -> torch.nn.Module:
        """The model with the original layers, which get the current weights and statistics."""
        for path, original in self._originals.items():
            layer = model.get_submodule(path)
            # The same tensors: an optimizer may hold them.
            original._parameters.update(layer._parameters)
            original._buffers.update(layer._buffers)
            original.train(layer.training)
            if not path:
                return original
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, original)
        self._originals = {}
        return model
