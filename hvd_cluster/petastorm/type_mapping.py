"""Types of Unischema fields: from Arrow, and as stored in Arrow and Spark."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any

import numpy as np

from hvd_cluster.data.columns.arrow_values import is_bytes, is_text
from hvd_cluster.data.optional import load_extra, load_pyarrow
from hvd_cluster.errors import DataError
from hvd_cluster.petastorm import spark_types
from hvd_cluster.petastorm.unischema_field import UnischemaField

logger = logging.getLogger(__name__)


def fields_of(source: Any, omit_unsupported_fields: bool) -> list[UnischemaField]:
    """See :meth:`hvd_cluster.petastorm.unischema.Unischema.from_arrow_schema`."""
    pyarrow = load_pyarrow()
    arrow_schema = source if isinstance(source, pyarrow.Schema) else source.schema
    if not isinstance(arrow_schema, pyarrow.Schema):
        arrow_schema = arrow_schema.to_arrow_schema()
    fields, omitted = [], []
    for field in arrow_schema:
        try:
            dtype, shape = _of_arrow(field.type)
        except DataError:
            omitted.append(f"{field.name} ({field.type})")
            continue
        fields.append(UnischemaField(field.name, dtype, shape, None, bool(field.nullable)))
    if omitted and not omit_unsupported_fields:
        raise DataError(f"no NumPy type fits the columns {', '.join(omitted)}: leave them out")
    if omitted:
        logger.warning("columns of types that no array holds are left out: %s", ", ".join(omitted))
    return fields


def _of_arrow(arrow_type: Any) -> tuple[Any, tuple[int | None, ...]]:
    types = load_pyarrow("pyarrow.types")
    if types.is_dictionary(arrow_type):
        return _of_arrow(arrow_type.value_type)
    if types.is_list(arrow_type) or types.is_large_list(arrow_type):
        dtype, shape = _of_arrow(arrow_type.value_type)
        return dtype, (None, *shape)
    if types.is_fixed_size_list(arrow_type):
        dtype, shape = _of_arrow(arrow_type.value_type)
        return dtype, (arrow_type.list_size, *shape)
    if is_text(arrow_type):
        return np.str_, ()
    if is_bytes(arrow_type):
        return np.bytes_, ()
    if types.is_decimal(arrow_type):
        return Decimal, ()
    if types.is_timestamp(arrow_type) or types.is_date(arrow_type):
        return np.datetime64, ()
    if types.is_boolean(arrow_type) or types.is_integer(arrow_type) or types.is_floating(arrow_type):
        return np.dtype(arrow_type.to_pandas_dtype()).type, ()
    raise DataError(f"no NumPy type fits {arrow_type}")


def of_stored(stored: spark_types.SparkType) -> Any:
    """The ``pyarrow.DataType`` that Spark writes for one of its types."""
    pyarrow = load_pyarrow()
    if isinstance(stored, spark_types.DecimalType):
        return pyarrow.decimal128(stored.precision, stored.scale)
    return {
        spark_types.BooleanType: pyarrow.bool_,
        spark_types.ByteType: pyarrow.int8,
        spark_types.ShortType: pyarrow.int16,
        spark_types.IntegerType: pyarrow.int32,
        spark_types.LongType: pyarrow.int64,
        spark_types.FloatType: pyarrow.float32,
        spark_types.DoubleType: pyarrow.float64,
        spark_types.StringType: pyarrow.string,
        spark_types.BinaryType: pyarrow.binary,
        spark_types.DateType: pyarrow.date32,
        spark_types.TimestampType: lambda: pyarrow.timestamp("us", "UTC"),
        spark_types.TimestampNTZType: lambda: pyarrow.timestamp("us"),
    }[type(stored)]()


def of_fields(fields: Iterable[UnischemaField]) -> Any:
    """The ``pyarrow.Schema`` of the encoded rows."""
    pyarrow = load_pyarrow()
    return pyarrow.schema(
        [pyarrow.field(field.name, of_stored(stored_type(field)), nullable=bool(field.nullable)) for field in fields]
    )


def stored_type(field: UnischemaField) -> spark_types.SparkType:
    """The type of a field's Parquet column."""
    if field.codec is not None:
        return field.codec.stored_type()
    if field.shape:
        raise DataError(
            f"field {field.name!r} has the shape {tuple(field.shape)} and no codec: give it one, such as NdarrayCodec()"
        )
    return spark_types.of_numpy(field.numpy_dtype)


def data_type(stored: spark_types.SparkType) -> Any:
    """One of our types as an instance of pyspark's class."""
    types = _types()
    kind = getattr(types, type(stored).__name__)
    return kind(stored.precision, stored.scale) if isinstance(stored, spark_types.DecimalType) else kind()


def struct_type(fields: Iterable[UnischemaField]) -> Any:
    """The ``StructType`` of the encoded rows of a schema's fields."""
    types = _types()
    return types.StructType(
        [types.StructField(field.name, data_type(stored_type(field)), bool(field.nullable)) for field in fields]
    )


def row(encoded: Mapping[str, Any]) -> Any:
    """Encoded values as a ``pyspark.sql.Row``."""
    return _types().Row(**encoded)


def _types() -> Any:
    return load_extra("pyspark.sql.types", "spark", "for Spark's rows and types")
