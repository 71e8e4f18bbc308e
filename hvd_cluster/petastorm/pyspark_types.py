"""Stored types, schemas and rows as instances of pyspark's classes."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from typing import Any

from hvd_cluster.errors import MissingExtraError
from hvd_cluster.petastorm import arrow_schema, spark_types
from hvd_cluster.petastorm.unischema_field import UnischemaField


def data_type(stored: spark_types.SparkType) -> Any:
    """One of our types as an instance of pyspark's class.

    Raises:
        MissingExtraError: pyspark is not installed.
    """
    types = _types()
    kind = getattr(types, type(stored).__name__)
    return kind(stored.precision, stored.scale) if isinstance(stored, spark_types.DecimalType) else kind()


def struct_type(fields: Iterable[UnischemaField]) -> Any:
    """The ``StructType`` of the encoded rows of a schema's fields.

    Raises:
        MissingExtraError: pyspark is not installed.
        DataError: nothing says how to store a field.
    """
    types = _types()
    return types.StructType(
        [
            types.StructField(field.name, data_type(arrow_schema.stored_type(field)), bool(field.nullable))
            for field in fields
        ]
    )


def row(encoded: Mapping[str, Any]) -> Any:
    """Encoded values as a ``pyspark.sql.Row``."""
    return _types().Row(**encoded)


def _types() -> Any:
    try:
        return importlib.import_module("pyspark.sql.types")
    except ImportError as error:
        raise MissingExtraError("pyspark", "spark", "for Spark's rows and types") from error
