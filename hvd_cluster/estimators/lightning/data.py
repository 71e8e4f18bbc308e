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


@dataclass
class ValidationBatches:
    """The validation batches: as many on every rank, so that modules may reduce what they like in each step."""

    readers: Readers
    floating_dtype: str
    #: How many; None where a data module of the user's own knows.
    steps: int | None = None
    first_repeated: int | None = None

    def __len__(self) -> int:
        if self.steps is None:
            raise TypeError("only the data module knows how many validation batches there are")
        return self.steps

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for batch in noting_repeated(self, self.readers.validation_batches()):
            yield floating(batch, self.floating_dtype)


class RepeatsRows(Protocol):
    """A validation loader that may fill its last batches with repeated rows."""

    #: The index of the first such batch of the current pass; None if there is none so far.
    first_repeated: int | None


def noting_repeated(loader: RepeatsRows, batches: Iterator[Any]) -> Iterator[Any]:
    """``batches``; notes in ``loader`` where repeated rows begin, because hooks of the module may replace batches."""
    loader.first_repeated = None
    for index, batch in enumerate(batches):
        if loader.first_repeated is None and isinstance(batch, RepeatedRow):
            loader.first_repeated = index
        yield batch


def is_repeated(loaders: Any, batch_idx: int, dataloader_idx: int) -> bool:
    """Whether a validation batch of a Trainer is a repeated row.

    Args:
        loaders: ``Trainer.val_dataloaders``: a loader, or a collection of loaders.
        batch_idx: the index of the batch in its loader.
        dataloader_idx: the index of the loader in a collection.
    """
    listed = [*loaders.values()] if isinstance(loaders, Mapping) else loaders
    loader = listed[dataloader_idx] if isinstance(listed, (list, tuple)) else listed
    first: int | None = getattr(loader, "first_repeated", None)
    return first is not None and batch_idx >= first


def floating(batch: Mapping[str, torch.Tensor], dtype: str) -> dict[str, torch.Tensor]:
    """The batch with every floating column in one dtype, that of the model."""
    wanted: torch.dtype = getattr(torch, dtype)
    return {name: column.to(wanted) if column.is_floating_point() else column for name, column in batch.items()}
