"""LightningDataModules over the Parquet of a fit, under Horovod's name. Importing this needs Lightning."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hvd_cluster.data.reader import ParquetReader
from hvd_cluster.estimators.lightning.data import floating
from hvd_cluster.estimators.run.data_module import PetastormDataModule as _PlainModule
from hvd_cluster.lightning.installed import lightning

_LightningDataModule: Any = lightning().LightningDataModule


class PetastormDataModule(_PlainModule, _LightningDataModule):
    """The reader of this package as a LightningDataModule; batches are dicts column -> tensor.

    ``LightningEstimator(data_module=...)`` takes a subclass, makes it in each worker and hands it to the Trainer, which
    calls ``train_dataloader()`` and ``val_dataloader()``.

    Args: those of :class:`hvd_cluster.estimators.run.data_module.DataModule`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _LightningDataModule.__init__(self)
        super().__init__(*args, **kwargs)

    def train_dataloader(self) -> Any:
        """The training batches; each epoch has an order of its own."""
        reader = self._train_reader()
        return self._epochs(reader, self.steps_per_epoch_train, lambda: self.trainer.current_epoch)

    def val_dataloader(self) -> Any:
        """The validation batches; none where no rows are held out."""
        if not self.has_val or self.val_dir is None:
            return []
        reader = self._val_reader("drop")
        return self._epochs(reader, min(self.steps_per_epoch_val, reader.steps), lambda: 0)

    def _epochs(self, reader: ParquetReader, steps: int, epoch: Callable[[], int]) -> _Epochs:
        return _Epochs(functools.partial(self._pass, reader), steps, epoch, self.kwargs.get("floating_dtype"))


class _Epochs:
    """A loader of ``steps`` batches of the epoch that the fit stands at; floating columns come in the model's dtype."""

    def __init__(
        self, pass_of: Callable[[int], Iterator[Any]], steps: int, epoch: Callable[[], int], dtype: str | None
    ) -> None:
        self._pass_of, self._steps, self._epoch, self._dtype = pass_of, steps, epoch, dtype

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for step, batch in enumerate(self._pass_of(self._epoch())):
            if step == self._steps:
                return
            yield batch if self._dtype is None else floating(batch, self._dtype)
