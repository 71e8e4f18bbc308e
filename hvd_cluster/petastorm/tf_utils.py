"""A petastorm reader's rows or batches as a ``tf.data.Dataset``.

Its items are namedtuples.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any

import numpy as np

from hvd_cluster.petastorm.reader import Reader
from hvd_cluster.petastorm.shuffling import batches
from hvd_cluster.petastorm.unischema_field import UnischemaField, python_value

#: Dtypes that few of TensorFlow's operators accept -> what they become, as in petastorm.
_WIDER = {"uint16": "int32", "uint32": "int64"}


#: Times that are Python objects: what Arrow's dates and timestamps with nulls beside them become.
_TIMES = (date, time, timedelta, np.datetime64)


def make_petastorm_dataset(reader: Reader) -> Any:
    """The items of a reader as a ``tf.data.Dataset``.

    They are rows of ``make_reader``, or batches of ``make_batch_reader``. uint16 becomes int32, uint32 int64,
    ``Decimal`` text, and days and times int64 nanoseconds since 1970. The data set can be iterated again after its end.

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
            yield type(item)(
                *(converted(name, value, fields[name][0]) for name, value in zip(fields, item, strict=True))
            )

    return _dataset(items, reader, fields)


def batched_dataset(reader: Reader, batch_size: int, shuffling_queue_capacity: int) -> Any:
    """The rows of ``reader`` in batches of ``batch_size``.

    ``shuffling_queue_capacity`` > 0 shuffles them.
    """
    fields = {name: described(field, batched=True) for name, field in reader.schema.fields.items()}
    passes = itertools.count()

    def items() -> Iterator[Any]:
        if reader.last_row_consumed:
            reader.reset()
        random = np.random.default_rng([reader.seed, next(passes)])  # as the loaders of torch
        for batch in batches(reader.row_batches(), batch_size, shuffling_queue_capacity, random):
            yield reader.schema.row_type(*(converted(name, batch.columns[name], fields[name][0]) for name in fields))

    return _dataset(items, reader, fields)


def described(field: UnischemaField, *, batched: bool) -> tuple[str, tuple[int | None, ...]]:
    """A field as TensorFlow sees it: its dtype's name and shape, ``batched`` or not."""
    return _dtype_of(field.numpy_dtype), ((None,) if batched else ()) + tuple(field.shape)


def _dtype_of(numpy_dtype: Any) -> str:
    """The dtype that TensorFlow gets for a field, described or converted."""
    if numpy_dtype is Decimal:
        return "string"
    dtype = np.dtype(numpy_dtype)
    if dtype.kind in "USO":
        return "string"
    if dtype.kind in "Mm":  # nanoseconds
        return "int64"
    return _WIDER.get(dtype.name, str(dtype.name))


def converted(name: str, value: Any, dtype: str | None = None) -> Any:
    """A row's or a batch's value as NumPy hands it to TensorFlow.

    Args:
        name: the field, for messages.
        value: what the reader gave.
        dtype: what :func:`described` says of the field; None goes by the value.

    Raises:
        TypeError: it is None, or holds None.
    """
    # NumPy's own text and bytes would lose zeros at their end.
    array = np.asarray(python_value(value), dtype=object) if isinstance(value, (bytes, str)) else np.asarray(value)
    if array.dtype == object:
        if any(item is None for item in array.ravel()):
            raise TypeError(f"field {name!r} holds None, which no tensor can: fill it in a TransformSpec")
        if all(isinstance(item, np.ndarray) for item in array.ravel()) and array.size:
            raise TypeError(f"rows of field {name!r} differ in shape: pad or cut them in a TransformSpec")
    are_times = array.dtype == object and array.size > 0 and isinstance(array.ravel()[0], _TIMES)
    if dtype is None:
        dtype = "int64" if are_times else _dtype_of(array.dtype)
    if dtype == "string":
        texts = [python_value(item) if isinstance(item, (bytes, str)) else str(item) for item in array.ravel()]
        return np.array(texts, dtype=object).reshape(array.shape)
    if are_times:
        moments = [_nanoseconds(item) for item in array.ravel()]
        return np.array(moments, dtype=np.int64).reshape(array.shape)
    if array.dtype.kind in "Mm":
        if np.isnat(array).any():
            raise TypeError(f"field {name!r} holds None, which no tensor can: fill it in a TransformSpec")
        return array.astype(f"{array.dtype.kind}8[ns]").astype(np.int64)
    if array.dtype.kind == "f" and np.dtype(dtype).kind in "iu" and not np.isfinite(array).all():
        raise TypeError(f"field {name!r} holds None, which no tensor can: fill it in a TransformSpec")
    return array.astype(dtype, copy=False)


def _nanoseconds(value: Any) -> int:
    """A date, timestamp or duration as nanoseconds.

    Those of a date or timestamp count from 1970, in UTC if it has no zone.
    """
    if isinstance(value, datetime) and value.tzinfo is not None:
        value = value.astimezone(timezone.utc).replace(tzinfo=None)
    if isinstance(value, timedelta):
        return int(np.timedelta64(value, "ns").astype(np.int64))
    if isinstance(value, time):
        value = datetime.combine(date(1970, 1, 1), value)
    return int(np.datetime64(value, "ns").astype(np.int64))


def _dataset(items: Any, reader: Reader, fields: dict[str, Any]) -> Any:
    from hvd_cluster.data.tf_dataset import of_iterator

    return of_iterator(items, reader.schema.row_type, fields)
