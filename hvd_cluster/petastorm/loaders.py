"""``horovod.spark.data_loaders.pytorch_data_loaders``.

Loaders over a petastorm reader, an epoch at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from hvd_cluster.data.loaders import AsyncDataLoaderMixin, BaseDataLoader
from hvd_cluster.errors import DataError
from hvd_cluster.petastorm.pytorch import BatchedDataLoader, InMemBatchedDataLoader
from hvd_cluster.petastorm.reader import Reader

#: Rows that the loaders in memory keep: all there are.
_ALL_ROWS = 1 << 62


class PytorchDataLoader(BaseDataLoader):
    """Dicts of tensors, as many per epoch as ``limit_step_per_epoch`` says.

    An epoch begins where the last one has left the reader, which starts again after its last row. An epoch that gets
    the last rows of a pass continues with those of the next one.

    Args:
        reader: what ``make_reader`` or ``make_batch_reader`` returned.
        batch_size: rows of a batch.
        shuffling_queue_capacity: rows that are shuffled among each other; 0 for none.
        name: for messages.
        limit_step_per_epoch: batches of an epoch; -1 for all that the reader has.
        verbose: accepted, and without effect.

    Raises:
        DataError: ``limit_step_per_epoch`` is neither -1 nor positive.
    """

    def __init__(
        self,
        reader: Reader,
        batch_size: int,
        shuffling_queue_capacity: int = 0,
        name: str = "",
        limit_step_per_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        if limit_step_per_epoch != -1 and limit_step_per_epoch < 1:
            raise DataError(f"limit_step_per_epoch is {limit_step_per_epoch}: give -1 for all, or a number of batches")
        self.reader = reader
        self.batch_size = batch_size
        self.shuffling_queue_capacity = shuffling_queue_capacity
        self.name = name
        self.limit_step_per_epoch = limit_step_per_epoch
        self.verbose = verbose
        self._begun = False
        self._num_passes = 0

    def __len__(self) -> int:
        if self.limit_step_per_epoch == -1:
            raise TypeError("the reader does not know how many batches it has: give limit_step_per_epoch")
        return self.limit_step_per_epoch

    def _iterate(self) -> Iterator[dict[str, torch.Tensor]]:
        is_fresh = self._restarted() or not self._begun
        self._begun = True
        num_batches = 0
        for batch in self._limited(self._drawn()):
            num_batches += 1
            yield batch
        is_short = num_batches < self.limit_step_per_epoch or num_batches == 0
        if is_short and not is_fresh and self._restarted():
            yield from self._limited(self._drawn(), num_batches)

    def _restarted(self) -> bool:
        """Start the reader again if it has given all its rows; whether it had."""
        is_over = self._begun and self.reader.last_row_consumed
        if is_over:
            self.reader.reset()
        return bool(is_over)

    def _drawn(self) -> Iterator[dict[str, torch.Tensor]]:
        """What the reader has left, in an order of its own."""
        loader = BatchedDataLoader(self.reader, self.batch_size, shuffling_queue_capacity=self.shuffling_queue_capacity)
        self._num_passes += 1
        return loader.drawn(self._num_passes)

    def _limited(self, batches: Iterator[Any], num_given: int = 0) -> Iterator[Any]:
        # Also without a limit: unlike a generator, a slice that is left early does not close what it takes from.
        limit = self.limit_step_per_epoch
        return itertools.islice(batches, None if limit == -1 else limit - num_given)


class PytorchInfiniteDataLoader(PytorchDataLoader):
    """The same over a reader without an end (``num_epochs=None``).

    An epoch continues where the last one ended. After an error the next epoch continues with the row group after the
    one that failed; rows that waited to be shuffled are lost.
    """

    _batches: Iterator[Any] | None = None

    def _iterate(self) -> Iterator[dict[str, torch.Tensor]]:
        if self._batches is None:
            self._batches = self._drawn()
        try:
            yield from self._limited(self._batches)
        except Exception:  # raised again: any error ends an iterator for good, but not the reader
            self._batches = None
            raise


class PytorchInmemDataLoader(BaseDataLoader):
    """The same with all rows in memory, read once.

    Args:
        reader: it is stopped when the rows are there.
        batch_size: rows of a batch.
        num_epochs: passes over the rows, over all epochs; None for no end.
        name: for messages.
        shuffle: whether each pass has an order of its own.
        limit_step_per_epoch: batches of an epoch; -1 for all of one pass.
        verbose: accepted, and without effect.
    """

    def __init__(
        self,
        reader: Reader,
        batch_size: int,
        num_epochs: int | None = None,
        name: str = "",
        shuffle: bool = False,
        limit_step_per_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        self.name = name
        self.verbose = verbose
        self._inner = InMemBatchedDataLoader(
            reader, batch_size, num_epochs=num_epochs, rows_capacity=_ALL_ROWS, shuffle=shuffle
        )
        self.limit_step_per_epoch = len(self._inner) if limit_step_per_epoch == -1 else limit_step_per_epoch
        self._batches: Iterator[Any] | None = None

    def __len__(self) -> int:
        return self.limit_step_per_epoch

    def _iterate(self) -> Iterator[dict[str, torch.Tensor]]:
        if self._batches is None:
            self._batches = iter(self._inner)
        yield from itertools.islice(self._batches, len(self))


class PytorchAsyncDataLoader(AsyncDataLoaderMixin, PytorchDataLoader):
    """:class:`PytorchDataLoader` that loads in advance."""


class PytorchInfiniteAsyncDataLoader(AsyncDataLoaderMixin, PytorchInfiniteDataLoader):
    """:class:`PytorchInfiniteDataLoader` that loads an epoch's batches in advance.

    An epoch that is left early loses those that were loaded in advance.
    """


class PytorchInmemAsyncDataLoader(AsyncDataLoaderMixin, PytorchInmemDataLoader):
    """:class:`PytorchInmemDataLoader` that loads in advance."""


#: Horovod's name of the loader that all of these stand on.
PetastormBatchedDataLoader = BatchedDataLoader
