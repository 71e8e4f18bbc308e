"""LightningDataModules over a fit's Parquet, under Horovod's name.

Importing this needs Lightning.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hvd_cluster.data.reader import ParquetReader
from hvd_cluster.estimators.lightning.data import BatchLoader, floating
from hvd_cluster.estimators.run.data_module import PetastormDataModule as _PlainModule
from hvd_cluster.estimators.run.reader_pool import batches_from
from hvd_cluster.estimators.run.readers import with_rows
from hvd_cluster.lightning.installed import lightning

_LightningDataModule: Any = lightning().LightningDataModule


class PetastormDataModule(_PlainModule, _LightningDataModule):
    """The reader of this package as a LightningDataModule.

    Batches are dicts column -> tensor. ``LightningEstimator(data_module=...)`` takes a subclass, and makes an instance
    in each worker for the Trainer, which calls ``train_dataloader()`` and ``val_dataloader()``.

    Args: those of :class:`hvd_cluster.estimators.run.data_module.DataModule`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _LightningDataModule.__init__(self)
        super().__init__(*args, **kwargs)

    def train_dataloader(self) -> Any:
        """The training batches; the next epoch continues one that leaves rows out."""
        reader, steps = self._train_reader(), self.steps_per_epoch_train
        return self._loader(lambda: batches_from(reader, self.trainer.current_epoch * steps, steps), steps)

    def val_dataloader(self) -> Any:
        """The validation batches, equally many on every rank.

        A rank without rows for the last one repeats a row. The list is empty if no rows are held out.
        """
        if not self.has_val or self.val_dir is None:
            return []
        reader = self._val_reader("partial")
        return self._loader(
            lambda: with_rows(reader.epoch(0), self._first_validation_row),
            min(self.steps_per_epoch_val, reader.steps),
        )

    def _loader(self, batches: Callable[[], Iterator[Any]], steps: int) -> BatchLoader:
        dtype = self.kwargs.get("floating_dtype")
        return BatchLoader(lambda: (floating(batch, dtype) for batch in itertools.islice(batches(), steps)), steps)

    def _first_validation_row(self) -> dict[str, torch.Tensor]:
        alone = ParquetReader(
            str(self.val_dir),
            self.schema_fields,
            batch_size=1,
            shuffle=False,
            transformation_fn=self.transform_fn,
            storage_options=self.storage_options,
            num_threads=1,
        )
        return next(alone.epoch(0))
