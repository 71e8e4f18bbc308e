"""The callback that finds out how to return the fitted module.

Importing this needs Lightning.
"""

from __future__ import annotations

from typing import Any

import torch

from hvd_cluster.estimators.lightning.layer_hooks import hooks_for, makes_layers
from hvd_cluster.estimators.lightning.spec import LightningSpec
from hvd_cluster.estimators.torch.changed_module import Structure
from hvd_cluster.estimators.torch.model_source import ModelSource
from hvd_cluster.lightning.installed import submodule

_callbacks: Any = submodule("callbacks")


class StructureCheck(_callbacks.Callback):
    """Checks that the fit can return the user's module.

    It does so before the training and after the first step of each epoch.

    Args:
        spec: of the fit.
        own: the user's module.
    """

    def __init__(self, spec: LightningSpec, own: torch.nn.Module) -> None:
        super().__init__()
        self._spec = spec
        self._own = own
        #: Lightning's hooks that give a copy of the module the layers of the trained one.
        self.hooks: tuple[str, ...] = ()
        #: That of the module in the driver, after these hooks.
        self.structure = Structure(own, spec)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Find the hooks.

        Raises:
            DataError: as :meth:`Structure.require_returnable`.
        """
        model = self._spec.model
        if makes_layers(self._own) and self.structure.differences(self._own):
            hooks = hooks_for(model.build() if isinstance(model, ModelSource) else model, self._own)
            if hooks is not None:
                self.hooks, self.structure = hooks, Structure(self._own, self._spec)
        self.structure.require_returnable(self._own, trainer.optimizers)

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        """Check what the epoch's first step, or a hook since the last one, has changed."""
        if trainer.fit_loop.epoch_loop.batch_progress.current.ready == 1:
            self.structure.require_returnable(self._own, trainer.optimizers)
