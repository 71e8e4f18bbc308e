"""The batches of a fit, as the loaders that a Lightning Trainer goes through once for each epoch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hvd_cluster.estimators.run.epoch_timer import EpochTimer
from hvd_cluster.estimators.run.readers import Readers, RepeatedRow


class EpochPosition(Protocol):
    """Knows where a fit stands."""

    @property
    def epoch(self) -> int:
        """The number of the epoch that goes on."""

    @property
    def timer(self) -> EpochTimer:
        """Its clock."""

    @property
    def done(self) -> int:
        """Batches of the epoch that an earlier start of the run has made."""

    def take_up(self) -> None:
        """Before the first batch of an epoch: go on where it was interrupted, if it was."""

    def between_batches(self) -> None:
        """The Trainer is through with a batch, validation included, and asks for the next; every rank takes part."""


@dataclass(frozen=True)
class TrainBatches:
    """The training batches of the epoch that the fit stands at."""

    readers: Readers
    position: EpochPosition
    #: torch's name of the dtype that floating columns get.
    floating_dtype: str

    def __len__(self) -> int:
        return self.readers.train_steps

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        # Asked for when the first batch is: a Trainer makes its first iterator before it has begun.
        position = self.position
        position.take_up()
        for batch in position.timer.timed(self.readers.train_batches(position.epoch, position.done)):
            yield floating(batch, self.floating_dtype)
            position.between_batches()


class OwnBatches:
    """The training batches of a loader of the user's own; those that an earlier start has made are taken and dropped.

    Its other attributes are the loader's, since a Trainer tells samplers the epoch; but for a state, with which it
    would begin amid the epoch itself.
    """

    def __init__(self, loader: Any, position: EpochPosition) -> None:
        self._loader = loader
        self._position = position

    def __getattr__(self, name: str) -> Any:
        if name in ("state_dict", "load_state_dict"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._loader)
        for _ in range(self._position.done):
            next(batches, None)
        # Only now: a loader may draw its order, and what it does to rows, from the same random generators.
        self._position.take_up()
        for batch in self._position.timer.timed(batches):
            yield batch
            self._position.between_batches()


@dataclass(frozen=True)
class ValidationBatches:
    """The validation batches: as many on every rank, so that modules may reduce what they like in each step."""

    readers: Readers
    floating_dtype: str
    #: How many; None where a data module of the user's own knows.
    steps: int | None = None

    def __len__(self) -> int:
        if self.steps is None:
            raise TypeError("only the data module knows how many validation batches there are")
        return self.steps

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for batch in self.readers.validation_batches():
            yield floating(batch, self.floating_dtype)


def floating(batch: Mapping[str, torch.Tensor], dtype: str) -> dict[str, torch.Tensor]:
    """The batch with every floating column in one dtype, that of the model."""
    wanted: torch.dtype = getattr(torch, dtype)
    found = {name: column.to(wanted) if column.is_floating_point() else column for name, column in batch.items()}
    return RepeatedRow(found) if isinstance(batch, RepeatedRow) else found
