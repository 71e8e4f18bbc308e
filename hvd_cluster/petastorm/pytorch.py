"""Loaders: a petastorm reader's rows as batches of torch tensors."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import torch

from hvd_cluster.errors import DataError
from hvd_cluster.monitor.timed_calls import timed_items
from hvd_cluster.petastorm.columns import Values
from hvd_cluster.petastorm.fragment_reader import RowBatch
from hvd_cluster.petastorm.reader import Reader
from hvd_cluster.petastorm.shuffling import batches, joined, taken

logger = logging.getLogger(__name__)

TransformFn = Callable[[Any], torch.Tensor]

#: Dtypes that few of torch's operators accept -> what they become.
_WIDER = {"uint16": np.int32, "uint32": np.int64, "bool": np.uint8}


def decimal_friendly_collate(batch: Sequence[Any]) -> Any:
    """A list of rows as one batch: tensors, but lists of ``Decimal`` and ``str``.

    Args:
        batch: rows of one structure: dicts, tuples, numbers, arrays.

    Raises:
        TypeError: a value is None, or of a type that has no tensor.
    """
    first = batch[0]
    if isinstance(first, Mapping):
        return {name: decimal_friendly_collate([row[name] for row in batch]) for name in first}
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(decimal_friendly_collate(values) for values in zip(*batch, strict=True)))
    if isinstance(first, (Decimal, str, bytes)):
        return list(batch)
    if isinstance(first, (tuple, list)):
        return [decimal_friendly_collate(values) for values in zip(*batch, strict=True)]
    return torch.utils.data.default_collate(list(batch))


class LoaderBase(ABC):
    """What the loaders over a reader have in common.

    One iteration is one pass over the reader's rows. A second iteration resets the reader, which needs the first one to
    have come to its end. Leaving a ``with`` block stops the reader.

    Args:
        reader: from ``make_reader`` or ``make_batch_reader``.
        batch_size: rows of a batch; the last one of a pass may have fewer.
        shuffling_queue_capacity: rows to draw the batches from; 0 keeps the reader's order.

    Raises:
        DataError: ``batch_size`` is below 1.
    """

    def __init__(self, reader: Reader, batch_size: int, shuffling_queue_capacity: int) -> None:
        if batch_size < 1 or shuffling_queue_capacity < 0:
            raise DataError(
                f"batch_size is {batch_size} and shuffling_queue_capacity {shuffling_queue_capacity}: give at least 1 "
                "and 0"
            )
        self.reader = reader
        self.batch_size = batch_size
        self.shuffling_queue_capacity = shuffling_queue_capacity
        self._num_passes = 0

    def __iter__(self) -> Iterator[Any]:
        if self._num_passes:
            self.reader.reset()
        self._num_passes += 1
        yield from self.drawn(self._num_passes)

    def drawn(self, number: int) -> Iterator[Any]:
        """The batches of what the reader has left, drawn in the order of pass ``number``."""
        # With the reader's seed, so that a seeded reader makes the batches repeatable too.
        random = np.random.default_rng([self.reader.seed, number])
        chunks = (self._prepared(chunk) for chunk in self.reader.row_batches())
        found = batches(chunks, self.batch_size, self.shuffling_queue_capacity, random)
        yield from timed_items(self._made(batch) for batch in found)

    def __enter__(self) -> LoaderBase:
        return self

    def __exit__(self, *exc: object) -> None:
        self.reader.stop()
        self.reader.join()

    def _prepared(self, chunk: RowBatch) -> RowBatch:
        """The rows of a row group, before they are cut into batches."""
        return chunk

    @abstractmethod
    def _made(self, batch: RowBatch) -> Any:
        """The batch that iteration gives, of rows that were drawn."""


class DataLoader(LoaderBase):
    """Batches as dicts: field -> tensor, or list for ``str`` and ``Decimal``.

    uint16 becomes int32, uint32 int64, and bool uint8.

    Args:
        reader, batch_size, shuffling_queue_capacity: as for all loaders.
        collate_fn: list of rows, each a dict of NumPy values -> batch.

    Raises:
        TypeError: (while iterating) a field has no tensor: bytes, times, None.
        DataError: (while iterating) rows of a field differ in shape.
    """

    def __init__(
        self,
        reader: Reader,
        batch_size: int = 1,
        collate_fn: Callable[[list[dict[str, Any]]], Any] = decimal_friendly_collate,
        shuffling_queue_capacity: int = 0,
    ) -> None:
        super().__init__(reader, batch_size, shuffling_queue_capacity)
        self.collate_fn = collate_fn

    def _prepared(self, chunk: RowBatch) -> RowBatch:
        return _with_tensors(chunk, torch.as_tensor) if self.collate_fn is decimal_friendly_collate else chunk

    def _made(self, batch: RowBatch) -> Any:
        if self.collate_fn is decimal_friendly_collate:
            listed = {name: _listed(values) for name, values in batch.columns.items()}
            return {
                name: values if _is_text(values) else _tensor(name, values, torch.as_tensor)
                for name, values in listed.items()
            }
        columns = {name: _widened(values) for name, values in batch.columns.items()}
        return self.collate_fn([dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)])


class BatchedDataLoader(LoaderBase):
    """Batches as dicts of tensors, made column by column.

    Args:
        reader, batch_size, shuffling_queue_capacity: as for all loaders.
        transform_fn: array of rows of a field -> tensor of as many; default is ``torch.as_tensor``.

    Raises:
        TypeError: (while iterating) a field has no tensor: text, bytes, decimals, times, None.
        DataError: (while iterating) rows of a field differ in shape.
    """

    def __init__(
        self,
        reader: Reader,
        batch_size: int = 1,
        transform_fn: TransformFn | None = None,
        shuffling_queue_capacity: int = 0,
    ) -> None:
        super().__init__(reader, batch_size, shuffling_queue_capacity)
        self.transform_fn = transform_fn or torch.as_tensor

    def _prepared(self, chunk: RowBatch) -> RowBatch:
        return _with_tensors(chunk, self.transform_fn)

    def _made(self, batch: RowBatch) -> dict[str, torch.Tensor]:
        return _tensors(batch, self.transform_fn)


class InMemBatchedDataLoader:
    """Batches from the first rows of a reader, kept in memory for several passes.

    It iterates once, over all passes.

    Args:
        reader: it is stopped when the rows are there.
        batch_size: rows of a batch; the last one of each pass may have fewer.
        transform_fn: array of a batch's field -> tensor; default is ``torch.as_tensor``.
        num_epochs: passes; None for no end.
        seed: of the orders.
        rows_capacity: rows to keep.
        shuffle: whether each pass has an order of its own.

    Raises:
        DataError: a number is below 1, or there are no rows.
    """

    def __init__(
        self,
        reader: Reader,
        batch_size: int = 1,
        transform_fn: TransformFn | None = None,
        num_epochs: int | None = 1,
        seed: int | None = 0,
        rows_capacity: int = 1024,
        shuffle: bool = False,
    ) -> None:
        if batch_size < 1 or rows_capacity < 1 or (num_epochs is not None and num_epochs < 1):
            raise DataError("batch_size, rows_capacity and num_epochs are at least 1")
        self.reader = reader
        self.batch_size = batch_size
        self.transform_fn = transform_fn or torch.as_tensor
        self.num_epochs = num_epochs
        self.shuffle = shuffle
        self._random = np.random.default_rng(seed)
        self._rows = self._loaded(rows_capacity)
        self._begun = False

    def __len__(self) -> int:
        """Batches of one pass."""
        return math.ceil(self._rows.rows / self.batch_size)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        if self._begun:
            raise RuntimeError("an InMemBatchedDataLoader iterates once: ask for more passes with num_epochs")
        self._begun = True
        epoch = 0
        while self.num_epochs is None or epoch < self.num_epochs:
            order = self._random.permutation(self._rows.rows) if self.shuffle else np.arange(self._rows.rows)
            for start in range(0, self._rows.rows, self.batch_size):
                yield _tensors(taken(self._rows, order[start : start + self.batch_size]), self.transform_fn)
            epoch += 1

    def __enter__(self) -> InMemBatchedDataLoader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.reader.stop()
        self.reader.join()

    def _loaded(self, capacity: int) -> RowBatch:
        chunks: list[RowBatch] = []
        count = 0
        try:
            for chunk in self.reader.row_batches():
                chunks.append(taken(chunk, np.arange(min(chunk.rows, capacity - count))))
                count += chunks[-1].rows
                if count == capacity:
                    break
        finally:
            self.reader.stop()
            self.reader.join()
        if not count:
            raise DataError("the reader has no rows")
        return joined(chunks)


def _with_tensors(chunk: RowBatch, transform_fn: TransformFn) -> RowBatch:
    """Columns of numbers as tensors, a row group at a time.

    What has to wait for its batch stays as is.
    """
    columns = {
        name: transform_fn(_array(name, values))
        if isinstance(values, np.ndarray) and values.dtype.kind in "biufc"
        else values
        for name, values in chunk.columns.items()
    }
    return RowBatch(columns, chunk.rows)


def _tensors(batch: RowBatch, transform_fn: TransformFn) -> dict[str, torch.Tensor]:
    return {name: _tensor(name, values, transform_fn) for name, values in batch.columns.items()}


def _tensor(name: str, values: Any, transform_fn: TransformFn) -> torch.Tensor:
    return values if isinstance(values, torch.Tensor) else transform_fn(_array(name, values))


def _listed(values: Values) -> Values:
    """Arrays of text and of objects as lists; other values as they are."""
    return values.tolist() if isinstance(values, np.ndarray) and values.dtype.kind in "UO" else values


def _is_text(values: Values) -> bool:
    return isinstance(values, list) and bool(values) and all(isinstance(value, (str, Decimal)) for value in values)


def _widened(values: Values) -> Values:
    if isinstance(values, np.ndarray):
        return values.astype(_WIDER.get(values.dtype.name, values.dtype), copy=False)
    return [
        value.astype(_WIDER[value.dtype.name])
        if isinstance(value, (np.ndarray, np.generic)) and value.dtype.name in _WIDER
        else value
        for value in values
    ]


def _array(name: str, values: Values) -> Any:
    """A batch's values of a field as one array, or as one tensor if they are such."""
    if isinstance(values, list) or values.dtype == object:
        if any(value is None for value in values):
            raise TypeError(
                f"field {name!r} holds None, which no tensor can: fill it in a TransformSpec, or leave it out"
            )
        are_tensors = all(isinstance(value, torch.Tensor) for value in values)  # a transform of rows may return them
        if not are_tensors and not all(isinstance(value, (np.ndarray, np.generic, int, float)) for value in values):
            raise TypeError(_no_tensor_text(name, type(values[0]).__name__))
        arrays: list[Any] = list(values) if are_tensors else [np.asarray(value) for value in values]
        if len({array.shape for array in arrays}) > 1:
            raise DataError(
                f"rows of field {name!r} differ in shape, {arrays[0].shape} and others: pad or cut them in a "
                "TransformSpec, or leave it out"
            )
        if are_tensors:
            return torch.stack(arrays)
        values = np.stack(arrays)
    widened = _widened(values)
    assert isinstance(widened, np.ndarray)
    if widened.dtype.kind not in "biufc":
        raise TypeError(_no_tensor_text(name, str(widened.dtype)))
    return widened if widened.flags.writeable else widened.copy()


def _no_tensor_text(name: str, kind: str) -> str:
    return f"field {name!r} holds {kind}, which no tensor can: turn it into numbers in a TransformSpec, or leave it out"
