"""The batches of a fit, as loaders that a Trainer iterates once for each epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hvd_cluster.data.reading.to_device import with_tensors
from hvd_cluster.errors import DataError
from hvd_cluster.estimators.lossy_casts import inexact_value
from hvd_cluster.estimators.run.readers import RepeatedRow

if TYPE_CHECKING:
    from hvd_cluster.estimators.lightning.callbacks import SaveRun


class BatchLoader:
    """A loader of the batches of an epoch.

    Args:
        batches: called at the start of each epoch, when the Trainer asks for the first batch.
        steps: how many; None if only a user's data module knows.
    """

    def __init__(self, batches: Callable[[], Iterator[dict[str, Any]]], steps: int | None) -> None:
        self._batches = batches
        self._steps = steps
        #: Index of the first batch of the current epoch that is a repeated row; hooks of the module may replace
        #: batches.
        self.first_repeated: int | None = None

    def __len__(self) -> int:
        if self._steps is None:
            raise TypeError("only the data module knows how many validation batches there are")
        return self._steps

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        self.first_repeated = None
        for index, batch in enumerate(self._batches()):
            if self.first_repeated is None and isinstance(batch, RepeatedRow):
                self.first_repeated = index
            yield batch


class ResumableLoader:
    """A user's loader without the training batches that an earlier start has made.

    Its other attributes are the loader's, since a Trainer sets the epoch of samplers. It has no state: with one the
    loader would skip batches itself.
    """

    def __init__(self, loader: Any, saving: SaveRun) -> None:
        self._loader = loader
        self._saving = saving

    def __getattr__(self, name: str) -> Any:
        if name in ("state_dict", "load_state_dict"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._loader)
        for _ in range(self._saving.done):
            next(batches, None)
        yield from saved_batches(batches, self._saving)


def saved_batches(batches: Iterator[Any], saving: SaveRun) -> Iterator[Any]:
    """The remaining training batches of an epoch, within which the run is saved."""
    # Random generators are restored now and not earlier: a loader may have drawn from them for the batches before.
    saving.before_first_batch()
    for batch in saving.run.timed(batches, saving.run.epoch, saving.done):
        yield batch
        saving.between_batches()


def floating(batch: dict[str, torch.Tensor], dtype: str | None) -> dict[str, torch.Tensor]:
    """The batch with floating columns in the model's dtype; None leaves them as is."""
    if dtype is None:
        return batch
    wanted: torch.dtype = getattr(torch, dtype)
    return with_tensors(batch, {name: one.to(wanted) for name, one in batch.items() if one.is_floating_point()})


def with_whole(batch: dict[str, torch.Tensor], names: Sequence[str]) -> dict[str, torch.Tensor]:
    """The batch with labels as int64.

    Raises:
        DataError: one of them holds another number.
    """
    for name in names:
        value = inexact_value(batch[name], "int64") if name in batch else None
        if value is not None:
            raise DataError(
                f"label column {name!r} holds {value}: training_step() takes whole numbers only (int64), and "
                "the rows of the trial held nothing else. Correct the column, or use a loss that takes floats"
            )
    return with_tensors(batch, {name: batch[name].long() for name in names if name in batch})
