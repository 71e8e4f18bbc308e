"""The batches of one rank: which ones an epoch has, and where the next epoch goes on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hvd_cluster.data.reader import ParquetReader

if TYPE_CHECKING:
    from torch import Tensor

    from hvd_cluster.estimators.spec import TrainSpec


class Readers:
    """Training and validation batches of one rank.

    A training epoch goes through all rows; the last global batch is filled up with rows seen before, so every batch is
    full and all ranks have as many. Validation takes each row once, in the order of the data; ranks may differ in
    their batches.
    """

    def __init__(self, spec: TrainSpec, rank: int, size: int) -> None:
        data = spec.dataset
        self._train = ParquetReader(
            data.train,
            data.schema,
            data.store,
            batch_size=spec.batch_size,
            rank=rank,
            size=size,
            seed=spec.seed,
            shuffle=spec.shuffle,
            remainder="pad",
            transformation_fn=spec.transformation_fn,
            num_threads=spec.train_reader_threads,
        )
        self._validation: ParquetReader | None = None
        if data.validation is not None:
            self._validation = ParquetReader(
                data.validation,
                data.schema,
                data.store,
                batch_size=spec.val_batch_size,
                rank=rank,
                size=size,
                shuffle=False,
                remainder="partial",
                transformation_fn=spec.transformation_fn,
                num_threads=spec.val_reader_threads,
            )
        self._validation_steps = spec.validation_steps_per_epoch
        #: Steps of a training epoch, the same on every rank.
        self.train_steps = spec.train_steps_per_epoch or self._train.steps
        #: Rows that all ranks together see a second time in an epoch that goes through the rows once.
        self.padding_rows = self._train.steps * spec.batch_size * size - data.train.rows
        if spec.train_steps_per_epoch is not None:
            self.padding_rows = 0

    def train_batches(self, epoch: int) -> Iterator[dict[str, Tensor]]:
        """The ``train_steps`` batches of an epoch; one that stops amid the rows is continued by the next."""
        done = epoch * self.train_steps
        end = done + self.train_steps
        while done < end:
            through, offset = divmod(done, self._train.steps)
            taken = min(self._train.steps - offset, end - done)
            yield from itertools.islice(self._train.epoch(through), offset, offset + taken)
            done += taken

    def validation_batches(self) -> Iterator[dict[str, Tensor]]:
        """Batches of the validation rows, without those that have no row on this rank."""
        if self._validation is not None:
            batches = itertools.islice(self._validation.epoch(0), self._validation_steps)
            yield from (batch for batch in batches if len(next(iter(batch.values()))))
