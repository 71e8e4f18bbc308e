"""A petastorm reader's rows, or batches of them, as a ``tf.data.Dataset`` of namedtuples."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import numpy as np

from hvd_cluster.data.petastorm.chunks import Chunk
from hvd_cluster.data.petastorm.reader import Reader
from hvd_cluster.data.petastorm.shuffling import batches
from hvd_cluster.data.petastorm.unischema import UnischemaField

#: What TensorFlow's operators take little of -> what it becomes, as in petastorm.
_WIDER = {"uint16": "int32", "uint32": "int64"}


def make_petastorm_dataset(reader: Reader) -> Any:
    """The items of a reader: rows of ``make_reader``, batches of ``make_batch_reader``.

    uint16 becomes int32, uint32 int64, ``Decimal`` text, and times int64 nanoseconds since 1970. The data set can be
    iterated again after its end.

    Args:
        reader: what to read; ``num_epochs`` is its own.

    Returns:
        A ``tf.data.Dataset`` of namedtuples.

    Raises:
        MissingExtraError: TensorFlow is not installed.
        TypeError: (while iterating) a value is None.
    """
    fields = {name: described(field, batched=reader.batched_output) for name, field in reader.schema.fields.items()}

    def items() -> Iterator[Any]:
        if reader.last_row_consumed:
            reader.reset()
        for item in reader:
            yield type(item)(*(converted(name, value) for name, value in zip(fields, item, strict=True)))

    return _dataset(items, reader, fields)


def batched_dataset(reader: Reader, batch_size: int, shuffling_queue_capacity: int) -> Any:
    """The rows of a reader in batches, drawn from ``shuffling_queue_capacity`` rows where that is not 0."""
    fields = {name: described(field, batched=True) for name, field in reader.schema.fields.items()}
    passes = itertools.count()

    def chunks() -> Iterator[Chunk]:
        while True:
            try:
                chunk = reader.next_chunk()
            except StopIteration:
                return
            yield chunk

    def items() -> Iterator[Any]:
        if reader.last_row_consumed:
            reader.reset()
        random = np.random.default_rng([reader.seed, next(passes)])  # as the loaders of torch
        for batch in batches(chunks(), batch_size, shuffling_queue_capacity, random):
            yield reader.schema.row_type(*(converted(name, batch.columns[name]) for name in fields))

    return _dataset(items, reader, fields)


def described(field: UnischemaField, *, batched: bool) -> tuple[str, tuple[int | None, ...]]:
    """A field as TensorFlow sees it: the name of its dtype, and its shape."""
    shape = ((None,) if batched else ()) + tuple(field.shape)
    if field.numpy_dtype is Decimal:
        return "string", shape
    dtype = np.dtype(field.numpy_dtype)
    if dtype.kind in "USO":
        return "string", shape
    if dtype.kind == "M":
        return "int64", shape
    return _WIDER.get(dtype.name, dtype.name), shape


def converted(name: str, value: Any) -> Any:
    """A row's or a batch's value as NumPy hands it to TensorFlow.

    Raises:
        TypeError: it is None, or holds None.
    """
    array = np.asarray(value)
    if array.dtype == object:
        if any(item is None for item in array.ravel()):
            raise TypeError(f"field {name!r} holds None, which no tensor can: fill it in a TransformSpec")
        if all(isinstance(item, np.ndarray) for item in array.ravel()):
            raise TypeError(f"rows of field {name!r} differ in shape: pad or cut them in a TransformSpec")
        return np.array([item if isinstance(item, bytes) else str(item) for item in array.ravel()]).reshape(array.shape)
    if array.dtype.kind == "M":
        return array.astype("datetime64[ns]").astype(np.int64)
    return array.astype(_WIDER.get(array.dtype.name, array.dtype), copy=False)


def _dataset(items: Any, reader: Reader, fields: dict[str, Any]) -> Any:
    from hvd_cluster.data.tf_dataset import of_iterator

    return of_iterator(items, reader.schema.row_type, fields)
