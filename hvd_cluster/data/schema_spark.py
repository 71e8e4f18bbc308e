"""The schema for a Spark DataFrame's types, on classic and Connect sessions."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from hvd_cluster.data.schema import UNKNOWN, Column, ColumnKind, Schema, each_column, no_tensor_type_text
from hvd_cluster.errors import DataError

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

_NUMBERS = {
    "byte": "int8",
    "short": "int16",
    "integer": "int32",
    "long": "int64",
    "float": "float32",
    "double": "float64",
    "boolean": "bool",
}
#: Spark's times in the unit that it keeps them in.
_TIMES = {"date": "D", "timestamp": "us", "timestamp_ntz": "us"}
_VECTORS = {"org.apache.spark.ml.linalg.VectorUDT", "org.apache.spark.mllib.linalg.VectorUDT"}


def infer(
    spark_schema: StructType,
    columns: Sequence[str] | None = None,
    wrong: list[str] | None = None,
    raw: Collection[str] = (),
) -> Schema:
    """The schema of a DataFrame's columns.

    Lengths of arrays and vectors are UNKNOWN until rows are seen.

    Args:
        spark_schema: ``df.schema``.
        columns: the columns to take, in that order; None for all.
        wrong: takes the problems, as that of :func:`hvd_cluster.data.schema.infer`.
        raw: columns that are kept as they are, likewise.

    Raises:
        DataError: columns are missing, ambiguous or of a type that no tensor can hold; all problems are named at once.
            With ``wrong`` only where Python cannot read a column from Spark: no job may ask for it.
    """
    existing = list(spark_schema.fieldNames())
    names = existing if columns is None else columns

    def column(name: str) -> Column:
        return Column.raw(name) if name in raw else column_of(name, spark_schema[name].dataType)

    found, problems = each_column(names, existing, column)
    unreadable = any(field.name in names and not _passes(field.dataType.jsonValue()) for field in spark_schema.fields)
    if wrong is not None and not unreadable:
        wrong += problems
    elif problems:
        raise DataError("\n".join(problems))
    return Schema(tuple(found.values()))


def infer_split(
    spark_schema: StructType,
    columns: Sequence[str],
    validation: float | str | None,
    wrong: list[str] | None = None,
    raw: Collection[str] = (),
) -> Schema:
    """The schema of the columns to train on.

    The column that marks rows for validation is checked before, if there is one.

    Args:
        validation: share of the rows, name of a column that is not one of ``columns``, or None.
        spark_schema, columns, wrong, raw: as :func:`infer` takes them.

    Raises:
        DataError: as :func:`infer`; or the validation column cannot mark rows.
    """
    marks = validation if isinstance(validation, str) else None
    schema = infer(spark_schema, [*columns, *([] if marks is None else [marks])], wrong, raw)
    if marks is not None and marks in schema and schema[marks].kind not in {ColumnKind.NUMERIC, ColumnKind.BOOL}:
        raise DataError(
            f"the validation column {marks!r} holds {schema[marks].kind.value}: it must be bool, or numeric with > 0 "
            "for validation"
        )
    return Schema(tuple(column for column in schema if column.name in columns))


def texts(spark_schema: StructType) -> dict[str, str]:
    """Columns that Spark gives to Python as text only, each with its type.

    Intervals of months are such.
    """
    odd = [field for field in spark_schema.fields if not _passes(field.dataType.jsonValue())]
    wrong = [
        f"column {field.name!r} has the type {field.dataType.simpleString()}, which Spark does not hand to Python: "
        "drop it, or cast it to string"
        for field in odd
        if not isinstance(field.dataType.jsonValue(), str)
    ]
    if wrong:
        raise DataError("\n".join(wrong))
    return {field.name: field.dataType.simpleString() for field in odd}


def _passes(described: Any) -> bool:
    """Whether Spark converts a type to Arrow and back, given in its JSON form."""
    if isinstance(described, str):
        return described != "interval" and not described.startswith(("interval year", "interval month"))
    fields = described.get("fields", ())
    inner = [described[part] for part in ("elementType", "keyType", "valueType", "sqlType") if part in described]
    inner += [field["type"] for field in fields]
    return len({field["name"] for field in fields}) == len(fields) and all(map(_passes, inner))


def _unit_of(described: str) -> str | None:
    """The unit of a date, time or duration in its JSON form; None for others."""
    if described.startswith(("interval day", "interval hour", "interval minute", "interval second")):
        return "us"
    return _TIMES.get(described)


def column_of(name: str, data_type: Any) -> Column:
    """The column for a Spark type."""
    # The JSON form is the same in all versions and sessions, and needs no import of pyspark.
    described = data_type.jsonValue()
    if isinstance(described, dict) and described.get("type") == "udt" and described.get("class") in _VECTORS:
        return Column(name, ColumnKind.VECTOR, "float64", (UNKNOWN,))
    shape: list[int] = []
    element = described
    while isinstance(element, dict) and element.get("type") == "array":
        shape.append(UNKNOWN)
        element = element["elementType"]
    if isinstance(element, str):
        dtype = "float64" if element.startswith("decimal") else _NUMBERS.get(element)
        if dtype is not None and shape:
            return Column(name, ColumnKind.LIST, dtype, tuple(shape))
        if dtype is not None:
            return Column(name, ColumnKind.BOOL if dtype == "bool" else ColumnKind.NUMERIC, dtype)
        if not shape and (element in {"string"} or element.startswith(("string ", "char", "varchar"))):
            return Column(name, ColumnKind.STRING, "str")
        if not shape and (unit := _unit_of(element)) is not None:
            return Column(name, ColumnKind.TIME, "int64", unit=unit)
        if not shape and element == "binary":
            return Column(name, ColumnKind.BINARY, "bytes")
    raise DataError(no_tensor_type_text(name, data_type.simpleString()))
