"""The batches of one rank: which ones an epoch has, and where the next epoch goes on."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from hvd_cluster.data.cache import MemoryCache
from hvd_cluster.data.reader import ParquetReader

if TYPE_CHECKING:
    from torch import Tensor

    from hvd_cluster.data.dataset import Split
    from hvd_cluster.estimators.spec import FitSpec

#: ``inmemory_cache_all`` keeps whatever there is.
_ALL_BYTES = 1 << 62
_UINT64 = (1 << 64) - 1


class RepeatedRow(dict[str, Any]):
    """A row seen elsewhere, in place of a validation batch that has no row on this rank: it counts nothing."""


def rows_of(batch: Any) -> int:
    """Rows of a batch of columns that count in means."""
    return 0 if isinstance(batch, RepeatedRow) else len(next(iter(batch.values())))


class Readers(ABC):
    """Training and validation batches of one rank, inside of its context."""

    #: Steps of a training epoch, the same on every rank.
    train_steps: int
    #: Rows that all ranks together see a second time in an epoch that goes through the rows once.
    padding_rows: int

    @staticmethod
    def of(spec: FitSpec, rank: int, size: int) -> Readers:
        """Our own reader's, or those of the data module that the spec names."""
        if spec.data_module is not None:
            from hvd_cluster.estimators.run.data_module import DataModuleReaders

            return DataModuleReaders(spec, rank, size)
        return ParquetReaders(spec, rank, size)

    def __enter__(self) -> Readers:
        return self

    def __exit__(self, *exc_info: Any) -> None:  # noqa: B027 - most have nothing open
        """Let go of what is open; told the exception that ends the training, if one does."""

    @abstractmethod
    def train_batches(self, epoch: int, done: int = 0) -> Iterator[dict[str, Tensor]]:
        """The ``train_steps`` batches of an epoch but for the first ``done``."""

    @abstractmethod
    def validation_batches(self) -> Iterator[dict[str, Tensor]]:
        """Batches of the validation rows, equally many on every rank.

        So a metric or callback of the user's may use collectives. A rank whose rows have ended gets
        :class:`RepeatedRow` from there on.
        """


class ParquetReaders(Readers):
    """Those of our own reader.

    A training epoch goes through all rows; the last global batch is filled up with rows seen before, so every batch is
    full and all ranks have as many. Validation takes each row once, in the order of the data.
    """

    def __init__(self, spec: FitSpec, rank: int, size: int) -> None:
        data = spec.dataset
        self._spec = spec
        self._rank = rank
        # A process beside this one lives for one pass, and epochs of so many steps end amid a pass.
        goes_on = spec.reader_pool_type != "process" and spec.train_steps_per_epoch is None
        self._train = self._reader(
            data.train,
            rank,
            size,
            batch_size=spec.batch_size,
            seed=spec.seed,
            shuffle=spec.shuffle,
            remainder="pad",
            num_threads=spec.train_reader_threads,
            num_epochs=spec.epochs if goes_on else None,
        )
        self._validation: ParquetReader | None = None
        if data.validation is not None:
            self._validation = self._reader(
                data.validation,
                rank,
                size,
                batch_size=spec.val_batch_size,
                shuffle=False,
                remainder="partial",
                num_threads=spec.val_reader_threads,
            )
        self.train_steps = spec.train_steps_per_epoch or self._train.steps
        self.padding_rows = self._train.steps * spec.batch_size * size - data.train.rows
        if spec.train_steps_per_epoch is not None:
            self.padding_rows = 0

    def __exit__(self, *exc_info: Any) -> None:
        self._train.close()

    def _reader(self, split: Split, rank: int, size: int, *, num_threads: int, **options: Any) -> ParquetReader:
        spec = self._spec
        return ParquetReader(
            split,
            spec.dataset.schema,
            spec.dataset.store,
            rank=rank,
            size=size,
            transformation_fn=spec.transformation_fn,
            **options_of_pool(spec.reader_pool_type, num_threads, spec.inmemory_cache_all),
            **options,
        )

    def train_batches(self, epoch: int, done: int = 0) -> Iterator[dict[str, Tensor]]:
        """As the base says; an epoch that stops amid the rows is continued by the next."""
        start = epoch * self.train_steps
        at, end = start + done, start + self.train_steps
        while at < end:
            through, offset = divmod(at, self._train.steps)
            taken = min(self._train.steps - offset, end - at)
            # A pass that is begun anew amid its rows fills its last batch up as one that was not.
            yield from itertools.islice(self._pass(self._train, through, offset), taken)
            at += taken

    def validation_batches(self) -> Iterator[dict[str, Tensor]]:
        if self._validation is not None:
            batches = itertools.islice(self._pass(self._validation, 0, 0), self._spec.validation_steps_per_epoch)
            yield from with_rows(batches, lambda: next(self._validation_of_one().epoch(0)))

    def _validation_of_one(self) -> ParquetReader:
        """The validation rows as a rank alone reads them: there are fewer rows than ranks."""
        assert self._spec.dataset.validation is not None
        return self._reader(
            self._spec.dataset.validation, 0, 1, batch_size=1, shuffle=False, remainder="partial", num_threads=1
        )

    def _pass(self, reader: ParquetReader, epoch: int, start: int) -> Iterator[dict[str, Tensor]]:
        spec = self._spec
        return one_pass(
            reader, epoch, start, spec.reader_pool_type, spec.mp_start_method, seed=spec.seed, rank=self._rank
        )


def with_rows(
    batches: Iterator[dict[str, Tensor]], first_row: Callable[[], dict[str, Tensor]]
) -> Iterator[dict[str, Tensor]]:
    """The batches, with a :class:`RepeatedRow` in place of each without rows; ``first_row`` where none had one."""
    seen: dict[str, Tensor] | None = None
    for batch in batches:
        if rows_of(batch):
            seen = batch
            yield batch
        else:
            seen = first_row() if seen is None else seen
            yield RepeatedRow({name: column[:1] for name, column in seen.items()})


def options_of_pool(pool_type: str, num_threads: int, in_memory: bool) -> dict[str, Any]:
    """Arguments of a ``ParquetReader`` for a ``reader_pool_type``.

    Args:
        num_threads: those that are asked for; "dummy" has one.
        in_memory: keep what was read. A process beside this one lives for one pass, and keeps nothing.
    """
    return {
        "num_threads": 1 if pool_type == "dummy" else num_threads,
        "cache": MemoryCache(_ALL_BYTES) if in_memory and pool_type != "process" else None,
    }


def one_pass(
    reader: ParquetReader,
    epoch: int,
    start: int,
    pool_type: str,
    start_method: str | None,
    *,
    seed: int,
    rank: int,
) -> Iterator[dict[str, Tensor]]:
    """One pass over the rows from its ``start``-th batch on, in this process or ("process") in one beside it.

    The process beside this one draws random numbers of its own in each pass and on each rank; a run that is repeated
    draws the same.
    """
    if pool_type != "process":
        return reader.epoch(epoch, start)
    beside = DataLoader(
        _Pass(reader, epoch, start),
        batch_size=None,
        num_workers=1,
        multiprocessing_context=start_method or "spawn",
        # It draws a number, the seed there, which the model would miss in a run that goes on amid a pass.
        generator=torch.Generator().manual_seed(_pass_seed(seed, epoch, rank, start)),
    )
    return iter(beside)


def _pass_seed(*numbers: int) -> int:
    return int(np.random.SeedSequence([number & _UINT64 for number in numbers]).generate_state(1, np.uint64)[0])


class _Pass(IterableDataset[Any]):
    """One pass, as a data set for a process beside this one."""

    def __init__(self, reader: ParquetReader, epoch: int, start: int) -> None:
        self._reader, self._epoch, self._start = reader, epoch, start

    def __reduce__(self) -> tuple[Any, ...]:
        """Functions of the user's travel by value, as they came here."""
        return _unpacked, (cloudpickle.dumps((self._reader, self._epoch, self._start)),)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return self._reader.epoch(self._epoch, self._start)


def _unpacked(blob: bytes) -> _Pass:
    return _Pass(*cloudpickle.loads(blob))
