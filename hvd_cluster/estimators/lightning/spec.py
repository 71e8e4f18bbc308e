"""What a worker must know to train with Lightning."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from hvd_cluster.estimators.spec import FitSpec
from hvd_cluster.estimators.torch.model_source import ModelSource
from hvd_cluster.estimators.torch.objective import Objective
from hvd_cluster.estimators.torch.optimizer_state import OptimizerState


@dataclass(frozen=True, kw_only=True)
class LightningSpec(FitSpec):
    """A Lightning run, complete: ``train`` needs nothing else.

    See :func:`hvd_cluster.estimators.lightning.train.train`.
    """

    #: A LightningModule; or any module, trained with ``optimizer`` and ``objective``; or a factory of one of them.
    model: torch.nn.Module | ModelSource
    optimizer: OptimizerState | None = None
    objective: Callable[[], Objective] | None = None
    #: Groups of fn(output, label) -> number, one function for each label column in a group.
    metrics: tuple[tuple[Any, ...], ...] = ()
    #: Their names in the history.
    metric_names: tuple[tuple[str, ...], ...] = ()
    #: torch's name of the dtype that floating columns have in the batches.
    floating_dtype: str = "float32"
    #: Label columns stored as floats that ``training_step`` gets as int64.
    whole_labels: tuple[str, ...] = ()
    #: A Lightning logger, or None for TensorBoard in the run's folder.
    logger: Any = None
    log_every_n_steps: int = 50
    profiler: Any = None
    #: Arguments of ``Trainer``, which replace those of this package.
    trainer_args: Mapping[str, Any] = field(default_factory=dict)

    @property
    def trained_with(self) -> tuple[str, ...]:
        from hvd_cluster.lightning.installed import lightning

        return (*super().trained_with, lightning().__name__)
