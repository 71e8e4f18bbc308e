"""Through Spark: rows encoded on executors become a petastorm data set, on every kind of session."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvd_cluster.petastorm import make_reader
from hvd_cluster.petastorm.codecs import CompressedImageCodec, NdarrayCodec, ScalarCodec
from hvd_cluster.petastorm.spark import dataset_as_rdd, materialize_dataset
from hvd_cluster.petastorm.unischema import Unischema, UnischemaField, dict_to_spark_row

pytestmark = pytest.mark.spark("local", "connect")


def schema() -> Unischema:
    from pyspark.sql.types import DecimalType, LongType  # pyspark's own are taken as ours are

    return Unischema(
        "Things",
        [
            UnischemaField("id", np.int64, (), ScalarCodec(LongType()), False),
            UnischemaField("price", Decimal, (), ScalarCodec(DecimalType(8, 2)), True),
            UnischemaField("x", np.float32, (None,), NdarrayCodec(), False),
            UnischemaField("image", np.uint8, (4, 3, 3), CompressedImageCodec("png"), False),
        ],
    )


def row(i: int) -> dict[str, Any]:
    price = None if i == 3 else Decimal(i) / 4
    return {"id": i, "price": price, "x": np.arange(i, dtype=np.float32), "image": np.full((4, 3, 3), i, np.uint8)}


def test_what_spark_writes_is_a_data_set(spark: Any, spark_master: str, tmp_path: Path) -> None:
    things, url = schema(), (tmp_path / "data").as_uri()
    with materialize_dataset(spark, url, things, row_group_size_mb=8):
        rows = [dict_to_spark_row(things, row(i)) for i in range(10)]
        spark.createDataFrame(rows, things.as_spark_schema()).repartition(2).write.parquet(url)
        if spark_master == "local":
            configuration = spark.sparkContext._jsc.hadoopConfiguration()
            assert configuration.get("parquet.block.size") == str(8 * 2**20)
    if spark_master == "local":
        assert configuration.get("parquet.block.size") != str(8 * 2**20), "what was set before is set again"
    with make_reader(url) as reader:
        read = {int(item.id): item for item in reader}
    assert sorted(read) == list(range(10))
    for i, item in read.items():
        assert item.price == row(i)["price"]
        np.testing.assert_array_equal(item.x, row(i)["x"])
        np.testing.assert_array_equal(item.image, row(i)["image"])
    if spark_master == "local":
        ids = dataset_as_rdd(url, spark, ["id"]).map(lambda item: int(item["id"])).collect()
        assert sorted(ids) == list(range(10))
