"""Spark's rows and types for scoring. Importing this needs pyspark."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from pyspark.ml.linalg import DenseVector, SparseVector, VectorUDT
from pyspark.sql import Row
from pyspark.sql.pandas.types import from_arrow_type
from pyspark.sql.types import ArrayType, DataType, FloatType

from hvd_cluster.data.schema import is_vector
from hvd_cluster.estimators.scoring.output_columns import ARRAY, VECTOR


def spark_type(name: str) -> DataType:
    """The Spark type of an output column."""
    special = {VECTOR: VectorUDT(), ARRAY: ArrayType(FloatType())}
    return special.get(name) or from_arrow_type(pa.from_numpy_dtype(name))


def rows_of(batch: Any) -> list[Row]:
    """An Arrow batch's rows as Spark passes them to Python, with Spark ML's vectors."""
    columns = []
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        values = column.to_pylist()
        if is_vector(column.type):
            values = [None if value is None else _vector(value) for value in values]
        columns.append((name, values))
    make = Row(*[name for name, _ in columns])
    return [make(*values) for values in zip(*(values for _, values in columns), strict=True)]


def _vector(value: dict[str, Any]) -> Any:
    if value["type"] == 1:
        return DenseVector(value["values"])
    return SparseVector(value["size"], value["indices"], value["values"])
