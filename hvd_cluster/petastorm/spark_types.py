"""Spark's leaf types as plain values, with no pyspark installed.

They are what a petastorm schema says of each stored field. The classes are named as Spark's are, so that
``ScalarCodec(IntegerType())`` reads alike with either. pyspark's own instances are accepted wherever these are;
:func:`from_spark` turns them into ours.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hvd_cluster.errors import DataError


class SparkType:
    """A leaf type; two of the same kind are equal."""

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), *sorted(vars(self).items())))

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class BooleanType(SparkType):
    """true or false."""


class ByteType(SparkType):
    """Signed integers of 8 bits."""


class ShortType(SparkType):
    """Signed integers of 16 bits."""


class IntegerType(SparkType):
    """Signed integers of 32 bits."""


class LongType(SparkType):
    """Signed integers of 64 bits."""


class FloatType(SparkType):
    """Floating-point numbers of 32 bits."""


class DoubleType(SparkType):
    """Floating-point numbers of 64 bits."""


class StringType(SparkType):
    """Text."""


class BinaryType(SparkType):
    """Bytes."""


class DateType(SparkType):
    """Days."""


class TimestampType(SparkType):
    """Microseconds, of UTC."""


class TimestampNTZType(SparkType):
    """Microseconds, of no time zone."""


class DecimalType(SparkType):
    """Decimal numbers."""

    def __init__(self, precision: Any = 10, scale: Any = 0) -> None:
        if not (isinstance(precision, int) and isinstance(scale, int) and 1 <= precision <= 38 and scale <= precision):
            raise DataError(f"there is no DecimalType({precision!r}, {scale!r}): 38 digits at most, scale <= precision")
        self.precision = precision
        self.scale = scale

    def __repr__(self) -> str:
        return f"DecimalType({self.precision},{self.scale})"


#: Name of the class, which is Spark's too -> ours.
SPARK_TYPES: dict[str, type[SparkType]] = {kind.__name__: kind for kind in SparkType.__subclasses__()}

#: What petastorm stores a scalar field in that names no codec. Unsigned integers go to the next wider signed type.
_OF_NUMPY: dict[type, type[SparkType]] = {
    np.bool_: BooleanType,
    np.int8: ByteType,
    np.uint8: ShortType,
    np.int16: ShortType,
    np.uint16: IntegerType,
    np.int32: IntegerType,
    np.int64: LongType,
    np.float32: FloatType,
    np.float64: DoubleType,
    np.str_: StringType,
    np.bytes_: StringType,
}


def from_spark(spark_type: Any) -> SparkType:
    """Our type for one of ours, or for an instance of Spark's class of the same name."""
    if isinstance(spark_type, SparkType):
        return spark_type
    name = type(spark_type).__name__
    kind = SPARK_TYPES.get(name)
    if kind is None or not type(spark_type).__module__.startswith("pyspark."):
        raise DataError(
            f"a scalar cannot be stored as {name}: give an instance of one of {', '.join(SPARK_TYPES)}, such as "
            "IntegerType()"
        )
    if kind is DecimalType:
        return DecimalType(int(spark_type.precision), int(spark_type.scale))
    return kind()


def of_numpy(numpy_dtype: Any) -> SparkType:
    """The type that a scalar field without a codec is stored in."""
    try:
        scalar = np.dtype(numpy_dtype).type
    except TypeError:
        scalar = numpy_dtype
    if scalar not in _OF_NUMPY:
        raise DataError(f"nothing says how to store {numpy_dtype}: give the field a codec, such as ScalarCodec(...)")
    return _OF_NUMPY[scalar]()
