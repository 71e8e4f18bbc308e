"""Finds the dtype of labels that are stored as floats, by trial.

``training_step`` is tried on a few rows in the driver.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hvd_cluster.estimators.lightning.data import floating
from hvd_cluster.estimators.run.random_state import set_aside
from hvd_cluster.estimators.torch.model_pickling import copied

logger = logging.getLogger(__name__)


def whole_labels(
    module: torch.nn.Module, batch: Mapping[str, torch.Tensor], dtype: str, labels: Sequence[str]
) -> tuple[str, ...]:
    """The labels stored as floats that ``training_step`` takes as int64 only.

    Classes of StringIndexer are such. A step that fails with floats and with int64, because it needs its Trainer, for
    example, decides nothing.

    Args:
        module: is copied for each call.
        batch: a few rows, as the reader yields them.
        dtype: torch's name of the dtype of floating columns in training.
        labels: the names of the label columns.
    """
    names = [name for name in labels if name in batch and batch[name].is_floating_point()]
    names = [name for name in names if bool((batch[name] == batch[name].round()).all() & batch[name].isfinite().all())]
    given = floating(dict(batch), dtype)
    if not names or _takes(module, given):
        return ()
    for some in [*([name] for name in names), names]:
        if _takes(module, given | {name: batch[name].long() for name in some}):
            logger.info("training_step() takes no floats as %s, so it gets int64", ", ".join(map(repr, some)))
            return tuple(some)
    return ()


def _takes(module: torch.nn.Module, batch: dict[str, torch.Tensor]) -> bool:
    """Whether a copy of the module makes a training step with the batch."""
    try:
        trial: Any = copied(module).to("cpu").train()
        step: Callable[..., Any] = trial.training_step
        arguments = [batch, 0][: len(inspect.signature(step).parameters)]
        with set_aside(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # self.log() warns without a Trainer
            step(*arguments)
    except Exception as error:  # noqa: BLE001 - the user's own code, which may raise anything
        logger.debug("training_step() failed in the driver: %s", error)
        return False
    return True
