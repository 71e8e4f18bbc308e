"""Metrics and batch norms over all ranks without torch.distributed.

Those of torchmetrics and of ``Trainer(sync_batchnorm=True)``.
"""

from __future__ import annotations

import math
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
        """The model with ``hvd.SyncBatchNorm`` for each batch normalization.

        Weights and buffers stay.
        """
        layers = dict(model.named_modules(remove_duplicate=False))
        converted = hvd.SyncBatchNorm.convert_sync_batchnorm(model)
        replaced = dict(converted.named_modules(remove_duplicate=False))
        self._originals = {path: layer for path, layer in layers.items() if replaced[path] is not layer}
        return converted

    def revert(self, model: torch.nn.Module) -> torch.nn.Module:
        """The model with the original layers, and current weights and statistics."""
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


def connect_metrics(module: torch.nn.Module) -> None:
    """Let the torchmetrics metrics in ``module`` gather state from all ranks.

    Those that have a ``dist_sync_fn`` stay as they are.
    """
    for part in module.modules():
        if hasattr(part, "distributed_available_fn") and getattr(part, "dist_sync_fn", ...) is None:
            part.dist_sync_fn = gather  # type: ignore[assignment]
            part.distributed_available_fn = is_distributed  # type: ignore[assignment]


def is_distributed() -> bool:
    """Whether there are other ranks to gather from."""
    return hvd.is_initialized() and hvd.size() > 1


def gather(tensor: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
    """The tensors of all ranks, by rank.

    They have the same number of dimensions; sizes may differ.

    Args:
        tensor: the tensor of this rank.
        group: the process set that takes part; None for all ranks.
    """
    process_set = hvd.global_process_set if group is None else group
    if not tensor.dim():
        return list(hvd.allgather(tensor.reshape(1), process_set=process_set).unbind())
    shapes = hvd.allgather(torch.tensor([tensor.shape]), process_set=process_set).tolist()
    everything = hvd.allgather(tensor.reshape(-1), process_set=process_set)
    parts = everything.split([math.prod(shape) for shape in shapes])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
