"""What types tell: from Arrow and, where pyspark is installed, from Spark."""

from __future__ import annotations

import pyarrow as pa
import pytest

from hvd_cluster.data import schema_spark
from hvd_cluster.data.columns.vectors import vector_type
from hvd_cluster.data.schema import UNKNOWN, Column, ColumnKind, Schema, infer
from hvd_cluster.errors import DataError

NUMBERS = ["int8", "int16", "int32", "int64", "uint8", "float16", "float32", "float64"]


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_keep_their_type(name: str) -> None:
    arrow_type = {"float16": pa.float16(), "float32": pa.float32(), "float64": pa.float64()}.get(name) or getattr(
        pa, name
    )()
    assert infer(pa.schema([("c", arrow_type)]))["c"] == Column("c", ColumnKind.NUMERIC, name)


@pytest.mark.parametrize(
    ("arrow_type", "column"),
    [
        (pa.uint16(), Column("c", ColumnKind.NUMERIC, "int32")),
        (pa.uint32(), Column("c", ColumnKind.NUMERIC, "int64")),
        (pa.uint64(), Column("c", ColumnKind.NUMERIC, "int64")),
        (pa.bool_(), Column("c", ColumnKind.BOOL, "bool")),
        (pa.decimal128(10, 2), Column("c", ColumnKind.NUMERIC, "float64")),
        (pa.timestamp("us"), Column("c", ColumnKind.TIME, "int64", unit="us")),
        (pa.timestamp("ns", "UTC"), Column("c", ColumnKind.TIME, "int64", unit="ns")),
        (pa.date32(), Column("c", ColumnKind.TIME, "int64", unit="D")),
        (pa.date64(), Column("c", ColumnKind.TIME, "int64", unit="D")),
        (pa.time32("ms"), Column("c", ColumnKind.TIME, "int64", unit="ms")),
        (pa.duration("s"), Column("c", ColumnKind.TIME, "int64", unit="s")),
        (pa.string(), Column("c", ColumnKind.STRING, "str")),
        (pa.large_string(), Column("c", ColumnKind.STRING, "str")),
        (pa.binary(), Column("c", ColumnKind.BINARY, "bytes")),
        (pa.list_(pa.float32()), Column("c", ColumnKind.LIST, "float32", (UNKNOWN,))),
        (pa.large_list(pa.bool_()), Column("c", ColumnKind.LIST, "bool", (UNKNOWN,))),
        (pa.list_(pa.int8(), 3), Column("c", ColumnKind.LIST, "int8", (3,))),
        (pa.list_(pa.list_(pa.uint16(), 4)), Column("c", ColumnKind.LIST, "int32", (UNKNOWN, 4))),
        (pa.dictionary(pa.int8(), pa.int64()), Column("c", ColumnKind.NUMERIC, "int64")),
        (vector_type(), Column("c", ColumnKind.VECTOR, "float64", (UNKNOWN,))),
    ],
    ids=str,
)
def test_every_type_that_a_tensor_can_hold_has_a_column(arrow_type: pa.DataType, column: Column) -> None:
    assert infer(pa.schema([("c", arrow_type)]))["c"] == column


def test_all_problems_are_named_at_once() -> None:
    fields = [("when", pa.month_day_nano_interval()), ("Age", pa.int8()), ("twice", pa.int8()), ("twice", pa.int8())]
    with pytest.raises(DataError) as caught:
        infer(pa.schema(fields), ["when", "age", "twice", "zzz"])
    text = str(caught.value)
    assert "column 'when' has the type month_day_nano_interval, which no tensor can hold" in text
    assert "there is no column 'age'; did you mean 'Age'?" in text
    assert "there is no column 'zzz'\n" in text
    assert "the columns are: 'when', 'Age', 'twice', 'twice'" in text
    assert "there are 2 columns named 'twice'" in text


def test_a_struct_that_only_resembles_a_vector_is_none() -> None:
    other = pa.struct(
        [("type", pa.int8()), ("size", pa.int32()), ("indices", pa.list_(pa.int32())), ("values", pa.int8())]
    )
    with pytest.raises(DataError, match="no tensor can hold"):
        infer(pa.schema([("v", other)]))


def test_a_schema_selects_and_measures_its_columns() -> None:
    schema = Schema(
        (
            Column("a", ColumnKind.LIST, "float32", (2, 3)),
            Column("b", ColumnKind.BOOL, "bool"),
            Column("s", ColumnKind.STRING, "str"),
        )
    )
    assert schema.select(["b", "a"]).names == ("b", "a")
    assert schema.row_bytes == 25
    assert "a" in schema
    assert len(schema) == 3
    with pytest.raises(DataError, match="no column 'c'"):
        schema.select(["c"])
    with pytest.raises(DataError, match=r"column 's' \(string\)"):
        schema.require_tensors()


def test_spark_types_describe_the_same_columns() -> None:
    types = pytest.importorskip("pyspark.sql.types", reason="pyspark is not installed")
    linalg = pytest.importorskip("pyspark.ml.linalg", reason="pyspark is not installed")
    spark = types.StructType(
        [
            types.StructField("i", types.ByteType()),
            types.StructField("l", types.LongType()),
            types.StructField("f", types.FloatType()),
            types.StructField("b", types.BooleanType()),
            types.StructField("d", types.DecimalType(10, 2)),
            types.StructField("s", types.StringType()),
            types.StructField("y", types.BinaryType()),
            types.StructField("a", types.ArrayType(types.ArrayType(types.ShortType()))),
            types.StructField("v", linalg.VectorUDT()),
            types.StructField("t", types.TimestampType()),
            types.StructField("p", types.DayTimeIntervalType()),
            types.StructField("q", types.DayTimeIntervalType(1, 2)),
            types.StructField("m", linalg.MatrixUDT()),
        ]
    )
    assert list(schema_spark.infer(spark, ["i", "l", "f", "b", "d", "s", "y", "a", "v", "t", "p", "q"])) == [
        Column("i", ColumnKind.NUMERIC, "int8"),
        Column("l", ColumnKind.NUMERIC, "int64"),
        Column("f", ColumnKind.NUMERIC, "float32"),
        Column("b", ColumnKind.BOOL, "bool"),
        Column("d", ColumnKind.NUMERIC, "float64"),
        Column("s", ColumnKind.STRING, "str"),
        Column("y", ColumnKind.BINARY, "bytes"),
        Column("a", ColumnKind.LIST, "int16", (UNKNOWN, UNKNOWN)),
        Column("v", ColumnKind.VECTOR, "float64", (UNKNOWN,)),
        *(Column(name, ColumnKind.TIME, "int64", unit="us") for name in "tpq"),
    ]
    with pytest.raises(DataError) as caught:
        schema_spark.infer(spark, ["m", "L"])
    assert "'m' has the type matrix" in str(caught.value)
    assert "did you mean 'l'?" in str(caught.value)


@pytest.mark.parametrize(
    ("names", "remedy"), [(["s"], "column 's' (string): leave it out"), (["s", "t"], "'t' (string): leave them out")]
)
def test_texts_are_refused_as_tensors_in_the_right_number(names: list[str], remedy: str) -> None:
    schema = Schema(tuple(Column(name, ColumnKind.STRING, "str") for name in names))
    with pytest.raises(DataError) as caught:
        schema.require_tensors()
    assert remedy in str(caught.value)
