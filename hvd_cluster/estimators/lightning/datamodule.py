"""LightningDataModules over the Parquet of a fit, under Horovod's name. Importing this needs Lightning."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch

from hvd_cluster.data.reader import ParquetReader
from hvd_cluster.estimators.lightning.data import floating
from hvd_cluster.lightning.installed import lightning

_LightningDataModule: Any = lightning().LightningDataModule


class PetastormDataModule(_LightningDataModule):
    """The reader of this package as a LightningDataModule; batches are dicts column -> tensor.

    ``LightningEstimator(data_module=...)`` takes a subclass, makes it in each worker and hands it to the Trainer, which
    calls ``train_dataloader()`` and ``val_dataloader()``.

    Args: those of :class:`hvd_cluster.estimators.run.data_module.DataModule`.
    """

    def __init__(
        self,
        train_dir: str,
        val_dir: str | None = None,
        num_train_epochs: int = 1,
        has_val: bool = True,
        train_batch_size: int = 32,
        val_batch_size: int = 32,
        shuffle: bool = True,
        transform_fn: Callable[..., Any] | None = None,
        inmemory_cache_all: bool = False,
        cur_shard: int = 0,
        shard_count: int = 1,
        schema_fields: Sequence[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        steps_per_epoch_train: int = 1,
        steps_per_epoch_val: int = 1,
        verbose: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.train_dir, self.val_dir = train_dir, val_dir
        self.num_train_epochs, self.has_val = num_train_epochs, has_val
        self.train_batch_size, self.val_batch_size = train_batch_size, val_batch_size
        self.shuffle, self.transform_fn, self.inmemory_cache_all = shuffle, transform_fn, inmemory_cache_all
        self.cur_shard, self.shard_count = cur_shard, shard_count
        self.schema_fields, self.storage_options = schema_fields, storage_options
        self.steps_per_epoch_train, self.steps_per_epoch_val = steps_per_epoch_train, steps_per_epoch_val
        self.verbose = verbose
        self.kwargs = kwargs

    def train_dataloader(self) -> Any:
        """The training batches; each epoch has an order of its own."""
        reader = self._reader(self.train_dir, self.train_batch_size, self.shuffle, "pad")
        return self._epochs(reader, self.steps_per_epoch_train, lambda: self.trainer.current_epoch)

    def val_dataloader(self) -> Any:
        """The validation batches; none where no rows are held out."""
        if not self.has_val or self.val_dir is None:
            return []
        reader = self._reader(self.val_dir, self.val_batch_size, False, "drop")
        return self._epochs(reader, min(self.steps_per_epoch_val, reader.steps), lambda: 0)

    def _epochs(self, reader: ParquetReader, steps: int, epoch: Callable[[], int]) -> _Epochs:
        return _Epochs(reader, steps, epoch, self.kwargs.get("floating_dtype"))

    def _reader(self, path: str, batch_size: int, shuffle: bool, remainder: Literal["pad", "drop"]) -> ParquetReader:
        return ParquetReader(
            path,
            self.schema_fields,
            batch_size=batch_size,
            rank=self.cur_shard,
            size=self.shard_count,
            seed=self.kwargs.get("seed", 0),
            shuffle=shuffle,
            remainder=remainder,
            transformation_fn=self.transform_fn,
            storage_options=self.storage_options,
        )


class _Epochs:
    """A loader of ``steps`` batches of the epoch that the fit stands at; floating columns come in the model's dtype."""

    def __init__(self, reader: ParquetReader, steps: int, epoch: Callable[[], int], dtype: str | None) -> None:
        self._reader, self._steps, self._epoch, self._dtype = reader, steps, epoch, dtype

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for step, batch in enumerate(self._reader.epoch(self._epoch())):
            if step == self._steps:
                return
            yield batch if self._dtype is None else floating(batch, self._dtype)
