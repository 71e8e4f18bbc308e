"""One field of a Unischema: type and shape of its values, and their codec."""

from __future__ import annotations

from decimal import Decimal
from typing import Any, NamedTuple, Protocol

import numpy as np

from hvd_cluster.petastorm.spark_types import SparkType


class Codec(Protocol):
    """What a field needs of its codec.

    The implementations are in :mod:`hvd_cluster.petastorm.codecs`.
    """

    def encode(self, unischema_field: UnischemaField, value: Any) -> Any:
        """The value as Parquet holds it."""

    def decode(self, unischema_field: UnischemaField, value: Any) -> Any:
        """The value of what Parquet holds."""

    def stored_type(self) -> SparkType:
        """The type of the Parquet column."""

    def spark_dtype(self) -> Any:
        """The same as an instance of pyspark's class."""


class UnischemaField(NamedTuple):
    """One field of a Unischema.

    Two fields are equal if all but their codecs are: how a value is stored is not what it is.
    """

    #: The field's name.
    name: str
    #: A NumPy scalar class (``np.uint8``, ``np.str_``, ``np.datetime64``, ...) or ``decimal.Decimal``.
    numpy_dtype: Any
    #: Shape of one row's value; None for a length that differs from row to row; () for scalars.
    shape: tuple[int | None, ...]
    #: How a value becomes what Parquet holds; None for what Parquet holds itself.
    codec: Codec | None = None
    #: Whether the value may be None.
    nullable: bool | None = False

    def _key(self) -> tuple[Any, ...]:
        return self.name, self.numpy_dtype, tuple(self.shape), bool(self.nullable)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UnischemaField) and self._key() == other._key()

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._key())


def python_value(value: Any) -> Any:
    """A NumPy scalar or array as Python's values; other values as they are.

    Python's values are numbers, str, bytes, times and lists.
    """
    # NumPy's own conversions, and str(), strip zeros at the end of text and bytes.
    if isinstance(value, bytes):
        return bytes(value)
    if isinstance(value, str):
        return str.__str__(value)
    return value.tolist() if isinstance(value, (np.generic, np.ndarray)) else value


def is_decimal(field: UnischemaField) -> bool:
    """Whether the values are ``decimal.Decimal``."""
    return field.numpy_dtype is Decimal
