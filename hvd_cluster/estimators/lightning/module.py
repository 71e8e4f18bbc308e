"""The LightningModule that trains a plain module with an optimizer and a loss.

Importing this needs Lightning.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from hvd_cluster.estimators.spec import called
from hvd_cluster.estimators.torch.means import reset_states
from hvd_cluster.estimators.torch.strategies.fsdp2 import FSDP2
from hvd_cluster.lightning.installed import lightning

if TYPE_CHECKING:
    from hvd_cluster.estimators.lightning.spec import LightningSpec

_LightningModule: Any = lightning().LightningModule


class LossModule(_LightningModule):
    """Trains ``net`` as TorchEstimator does, and logs loss and metrics.

    The names of what it logs begin with ``train_`` and ``val_``.
    """

    def __init__(self, spec: LightningSpec, net: torch.nn.Module) -> None:
        super().__init__()
        self.net = net
        self._spec = spec
        #: Batches come from a LightningDataModule, and hooks of its may have changed them on the device.
        self.checks_batches = False
        assert spec.objective is not None
        self._objective = spec.objective()
        #: Losses that are modules move to the device with this one.
        self.losses = torch.nn.ModuleList(loss for loss in self._objective.losses if isinstance(loss, torch.nn.Module))

    def forward(self, *inputs: torch.Tensor, **named: torch.Tensor) -> Any:
        """The model's outputs."""
        return self.net(*inputs, **named)

    def on_fit_start(self) -> None:
        """Move metrics that are modules to the device.

        If they were parts of this module, they would be in its checkpoints.
        """
        for metric in (metric for group in self._spec.metrics for metric in group):
            if isinstance(metric, torch.nn.Module):
                metric.to(self.device)

    def on_train_epoch_end(self) -> None:
        """Reset metrics with a state, which Lightning does for parts of the module."""
        reset_states(metric for group in self._spec.metrics for metric in group)

    def on_validation_epoch_start(self) -> None:
        """Keep what the training has added to metrics with a state out of the validation."""
        self.on_train_epoch_end()

    def on_validation_epoch_end(self) -> None:
        """Reset metrics with a state."""
        self.on_train_epoch_end()

    def training_step(self, batch: Mapping[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """The loss of a batch."""
        return self._step(batch, "train")

    def validation_step(self, batch: Mapping[str, torch.Tensor], batch_idx: int) -> None:
        """Log the numbers of a validation batch."""
        self._step(batch, "val")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The user's optimizer, for this copy of the model."""
        given = self._spec.optimizer
        assert given is not None
        if not isinstance(self._spec.sharding, FSDP2):
            return given.build(self.net)
        from hvd_cluster.estimators.torch.strategies.fully_sharded import sharded_optimizer

        return sharded_optimizer(given, self.net)

    def _step(self, batch: Mapping[str, torch.Tensor], part: str) -> torch.Tensor:
        columns = self._spec.inputs
        if self.checks_batches:
            columns.checked(batch)
        labels, weights = columns.labels(batch, self.device), columns.sample_weights(batch, self.device)
        raw = called(self.net, columns.features(batch, self.device), **columns.label_arguments(labels))
        outputs, shaped, loss = self._objective.evaluated(raw, labels, weights)
        logged: dict[str, Any] = {f"{part}_loss": loss.detach()}
        for names, group in zip(self._spec.metric_names, self._spec.metrics, strict=True):
            for name, metric, output, label in zip(names, group, outputs, shaped, strict=True):
                logged[f"{part}_{name}"] = torch.as_tensor(metric(output.detach(), label)).float()
        self.log_dict(logged, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(labels[0]))
        return loss
