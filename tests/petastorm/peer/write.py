"""Runs where petastorm is installed: writes data sets with its own API, and what its own readers make of them.

    python write.py FOLDER

The result is kept in ``tests/petastorm/files``; ``make test-matrix`` makes it again and reads it the same way.
"""

import datetime as dt
import decimal
import json
import os
import shutil
import sys
import warnings
from pathlib import Path

warnings.simplefilter("ignore")
os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable

import numpy as np  # noqa: E402 - the warnings and variables above are for these imports
from petastorm import TransformSpec, make_batch_reader, make_reader  # noqa: E402
from petastorm.codecs import CompressedImageCodec, CompressedNdarrayCodec, NdarrayCodec, ScalarCodec  # noqa: E402
from petastorm.etl.dataset_metadata import materialize_dataset  # noqa: E402
from petastorm.etl.rowgroup_indexers import FieldNotNullIndexer, SingleFieldIndexer  # noqa: E402
from petastorm.etl.rowgroup_indexing import build_rowgroup_index  # noqa: E402
from petastorm.predicates import in_lambda, in_negate, in_pseudorandom_split, in_reduce, in_set  # noqa: E402
from petastorm.selectors import IntersectIndexSelector, SingleIndexSelector, UnionIndexSelector  # noqa: E402
from petastorm.unischema import Unischema, UnischemaField, dict_to_spark_row  # noqa: E402
from pyspark.sql import SparkSession  # noqa: E402
from pyspark.sql.types import (  # noqa: E402
    BooleanType,
    ByteType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    TimestampType,
)

EVERYTHING = Unischema(
    "Everything",
    [
        UnischemaField("id", np.int64, (), ScalarCodec(LongType()), False),
        UnischemaField("i8", np.int8, (), ScalarCodec(ByteType()), False),
        UnischemaField("i16", np.int16, (), ScalarCodec(ShortType()), True),
        UnischemaField("u8", np.uint8, (), ScalarCodec(ShortType()), False),
        UnischemaField("u16", np.uint16, (), ScalarCodec(IntegerType()), False),
        UnischemaField("f32", np.float32, (), ScalarCodec(FloatType()), True),
        UnischemaField("f64", np.float64, (), ScalarCodec(DoubleType()), False),
        UnischemaField("flag", np.bool_, (), ScalarCodec(BooleanType()), True),
        UnischemaField("text", np.str_, (), ScalarCodec(StringType()), True),
        UnischemaField("price", decimal.Decimal, (), ScalarCodec(DecimalType(10, 3)), True),
        UnischemaField("plain", np.int32, (), None, False),
        UnischemaField("points", np.float32, (None, 3), NdarrayCodec(), False),
        UnischemaField("packed", np.uint16, (2, None), CompressedNdarrayCodec(), True),
        UnischemaField("words", np.str_, (None,), NdarrayCodec(), False),
        UnischemaField("png", np.uint8, (8, 6, 3), CompressedImageCodec("png"), False),
        UnischemaField("grey", np.uint8, (4, 5), CompressedImageCodec("png"), False),
        UnischemaField("grey16", np.uint16, (8, 6), CompressedImageCodec("png"), False),
        UnischemaField("colour16", np.uint16, (16, 9, 3), CompressedImageCodec("png"), False),
        UnischemaField("jpeg", np.uint8, (None, None, 3), CompressedImageCodec("jpeg", 90), False),
        UnischemaField("moment", np.datetime64, (), ScalarCodec(TimestampType()), False),
        UnischemaField("day", np.datetime64, (), ScalarCodec(DateType()), True),
    ],
)
KEYED = Unischema(
    "Keyed",
    [
        UnischemaField("id", np.int64, (), ScalarCodec(LongType()), False),
        UnischemaField("month", np.str_, (), ScalarCodec(StringType()), False),
        UnischemaField("x", np.float64, (2,), NdarrayCodec(), False),
    ],
)
ROWS = 10


def everything(i):
    random = np.random.RandomState(i)
    smooth = np.add.outer(np.arange(16 + i), np.arange(12))[..., None] * np.array([1, 3, 5]) + i
    return {
        "id": np.int64(i),
        "i8": np.int8(-i),
        "i16": None if i % 4 == 3 else np.int16(i * 100),
        "u8": np.uint8(200 + i),
        "u16": np.uint16(60000 + i),
        "f32": None if i % 4 == 1 else np.float32(i / 3),
        "f64": i / 7,
        "flag": None if i % 4 == 2 else bool(i % 2),
        "text": None if i % 5 == 2 else f"row {i} \u00fc",
        "price": None if i % 5 == 4 else decimal.Decimal(i) / 8,
        "plain": np.int32(i),
        "points": random.rand(i % 3 + 1, 3).astype(np.float32),
        "packed": None if i % 3 == 0 else random.randint(0, 65536, (2, i + 1)).astype(np.uint16),
        "words": np.array(["a", "bb" * i]),
        "png": random.randint(0, 256, (8, 6, 3)).astype(np.uint8),
        "grey": random.randint(0, 256, (4, 5)).astype(np.uint8),
        "grey16": random.randint(0, 65536, (8, 6)).astype(np.uint16),
        # Smooth, so that the encoder has a use for each of PNG's row filters.
        "colour16": (smooth[:16, :9] * 97 + random.randint(0, 9, (16, 9, 3))).astype(np.uint16),
        "jpeg": (smooth % 256).astype(np.uint8),
        "moment": dt.datetime.fromisoformat(f"2020-01-02T{i:02d}:02:03.456789"),
        "day": None if i % 3 == 1 else dt.date(2020, 2, 1 + i),
    }


def keyed(i):
    return {"id": np.int64(i), "month": f"{i % 3 + 1:02d}", "x": np.array([i, -i], dtype=np.float64)}


def write(spark, url, schema, row, partition=None):
    with materialize_dataset(spark, url, schema, 1):
        rows = spark.sparkContext.parallelize(range(ROWS), 3).map(lambda i: dict_to_spark_row(schema, row(i)))
        frame = spark.createDataFrame(rows, schema.as_spark_schema())
        (frame.write.partitionBy(partition) if partition else frame.write).parquet(url)


def write_plain(spark, url):
    """Parquet of Spark's own, without petastorm's metadata."""
    columns = (
        "id bigint, x float, n int, flag boolean, name string, v array<double>, price decimal(6,2), t timestamp, d date"
    )
    rows = [
        (
            i,
            i / 2,
            None if i == 3 else i,
            i % 2 == 0,
            f"name {i}",
            [i / 4, 1.0],
            decimal.Decimal(i) / 4,
            dt.datetime.fromisoformat(f"2021-03-04T05:{i:02d}:00"),
            dt.date(2021, 3, 1 + i),
        )
        for i in range(ROWS)
    ]
    spark.createDataFrame(rows, columns).repartitionByRange(2, "id").sortWithinPartitions("id").write.parquet(url)


def kept(value):
    """What ``np.savez`` takes without pickling; None for null."""
    if isinstance(value, decimal.Decimal):
        return np.array(str(value))
    array = np.asarray(value)
    if array.dtype == object:
        return np.array([str(item) for item in array.ravel()]).reshape(array.shape)
    return array


def read_rows(url):
    """ "field/id" -> value, as petastorm's reader gives it; nulls are left out."""
    values = {}
    with make_reader(url, reader_pool_type="dummy", shuffle_row_groups=False) as reader:
        for row in reader:
            for name, value in row._asdict().items():
                if value is not None:
                    values[f"{name}/{row.id}"] = kept(value)
    return values


def read_batches(url):
    columns = {}
    with make_batch_reader(url, reader_pool_type="dummy", shuffle_row_groups=False) as reader:
        for batch in reader:
            for name, value in batch._asdict().items():
                columns.setdefault(name, []).append(kept(value))
    order = np.argsort(np.concatenate(columns["id"]))
    return {name: np.concatenate(parts)[order] for name, parts in columns.items()}


def answers(everything_url, keyed_url):
    """What petastorm's readers do with their arguments, on the data sets above."""

    def ids(url=everything_url, **kargs):
        with make_reader(url, reader_pool_type="dummy", shuffle_row_groups=False, **kargs) as reader:
            return [int(row.id) for row in reader]

    def split(value, index):
        return in_pseudorandom_split([0.3, 0.4], index, "f").do_include({"f": value})

    spread = [*range(200), *[f"k{i}" for i in range(200)], *[i / 8 for i in range(50)]]
    negative = in_lambda(["i8"], lambda i8: i8 < -4)
    transform = TransformSpec(
        lambda row: {"double": np.float64(row["f64"] * 2), "id": row["id"]},
        edit_fields=[("double", np.float64, (), False)],
        removed_fields=["f64"],
    )
    with make_reader(
        everything_url,
        ["id", "f64"],
        reader_pool_type="dummy",
        shuffle_row_groups=False,
        transform_spec=transform,
    ) as reader:
        transformed = [[int(row.id), float(row.double)] for row in reader]
    return {
        "shards": [ids(cur_shard=shard, shard_count=3) for shard in range(3)],
        "in_set": ids(predicate=in_set({1, 5, 77}, "id")),
        "in_lambda": ids(predicate=negative),
        "in_negate": ids(predicate=in_negate(negative)),
        "in_reduce": ids(predicate=in_reduce([negative, in_set({1, 7}, "id")], any)),
        "keyed_in_set": ids(keyed_url, predicate=in_set({"02"}, "month")),
        "by_id": ids(rowgroup_selector=SingleIndexSelector("by_id", [4])),
        "union": ids(
            rowgroup_selector=UnionIndexSelector(
                [SingleIndexSelector("by_id", [0]), SingleIndexSelector("by_text", ["row 9 \u00fc"])]
            )
        ),
        "intersect": ids(
            rowgroup_selector=IntersectIndexSelector(
                [SingleIndexSelector("by_id", [0, 4]), SingleIndexSelector("by_text", ["row 5 \u00fc"])]
            )
        ),
        "splits": {str(index): [split(value, index) for value in spread] for index in range(2)},
        "transformed": transformed,
    }


def main():
    folder = Path(sys.argv[1]).absolute()
    shutil.rmtree(folder, ignore_errors=True)
    spark = (
        SparkSession.builder.master("local[1]")
        .config("spark.ui.enabled", False)
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.sql.session.timeZone", "UTC")
        .getOrCreate()
    )
    urls = {name: f"file://{folder}/{name}" for name in ("everything", "keyed", "plain")}
    write(spark, urls["everything"], EVERYTHING, everything)
    build_rowgroup_index(
        urls["everything"],
        spark.sparkContext,
        [
            SingleFieldIndexer("by_id", "id"),
            SingleFieldIndexer("by_text", "text"),
            FieldNotNullIndexer("known", "text"),
        ],
    )
    write(spark, urls["keyed"], KEYED, keyed, "month")
    write_plain(spark, urls["plain"])
    spark.stop()
    np.savez_compressed(folder / "everything.npz", **read_rows(urls["everything"]))
    np.savez_compressed(folder / "keyed.npz", **read_rows(urls["keyed"]))
    np.savez_compressed(folder / "plain.npz", **read_batches(urls["plain"]))
    (folder / "answers.json").write_text(json.dumps(answers(urls["everything"], urls["keyed"]), indent=1) + "\n")
    for file in [*folder.rglob("*.crc"), *folder.rglob("_SUCCESS")]:
        file.unlink()


if __name__ == "__main__":
    main()
