"""The batches of our readers, as the loaders that a Lightning Trainer goes through once for each epoch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from hvd_cluster.estimators.run.readers import Readers
from hvd_cluster.estimators.run.watch import Watch


class Standing(Protocol):
    """Knows where a fit stands."""

    @property
    def epoch(self) -> int:
        """The number of the epoch that goes on."""

    @property
    def watch(self) -> Watch:
        """Its clock."""


@dataclass(frozen=True)
class TrainBatches:
    """The training batches of the epoch that the fit stands at."""

    readers: Readers
    standing: Standing
    #: torch's name of the dtype that floating columns get.
    floating_dtype: str

    def __len__(self) -> int:
        return self.readers.train_steps

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        # Asked for when the first batch is: a Trainer makes its first iterator before it has begun.
        standing = self.standing
        for batch in standing.watch.timed(self.readers.train_batches(standing.epoch)):
            yield floating(batch, self.floating_dtype)


@dataclass(frozen=True)
class ValidationBatches:
    """The validation batches: as many on every rank, so that modules may reduce what they like in each step."""

    readers: Readers
    floating_dtype: str

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for batch in self.readers.validation_batches(even=True):
            yield floating(batch, self.floating_dtype)


def floating(batch: Mapping[str, torch.Tensor], dtype: str) -> dict[str, torch.Tensor]:
    """The batch with every floating column in one dtype, that of the model."""
    wanted: torch.dtype = getattr(torch, dtype)
    return {name: column.to(wanted) if column.is_floating_point() else column for name, column in batch.items()}
