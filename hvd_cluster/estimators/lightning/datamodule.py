"""LightningDataModules over the Parquet of a fit, under Horovod's name. Importing this needs Lightning."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from hvd_cluster.data.reader import ParquetReader
from hvd_cluster.estimators.lightning.data import floating, noting_repeated
from hvd_cluster.estimators.run.data_module import PetastormDataModule as _PlainModule
from hvd_cluster.estimators.run.readers import with_rows
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
        return self._epochs(lambda: self._pass(reader, self.trainer.current_epoch), self.steps_per_epoch_train)

    def val_dataloader(self) -> Any:
        """The validation batches, as many on every rank: one without rows in the last of them sees one again.

        None where no rows are held out.
        """
        if not self.has_val or self.val_dir is None:
            return []
        reader = self._val_reader("partial")
        return self._epochs(
            lambda: with_rows(self._pass(reader, 0), self._first_validation_row),
            min(self.steps_per_epoch_val, reader.steps),
        )

    def _epochs(self, pass_of: Callable[[], Iterator[Any]], steps: int) -> _Epochs:
        return _Epochs(pass_of, steps, self.kwargs.get("floating_dtype"))

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


class _Epochs:
    """A loader of ``steps`` batches of the epoch that the fit stands at; floating columns come in the model's dtype."""

    def __init__(self, pass_of: Callable[[], Iterator[Any]], steps: int, dtype: str | None) -> None:
        self._pass_of, self._steps, self._dtype = pass_of, steps, dtype
        self.first_repeated: int | None = None

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for step, batch in enumerate(noting_repeated(self, self._pass_of())):
            if step == self._steps:
                return
            yield batch if self._dtype is None else floating(batch, self._dtype)
