"""petastorm data sets through Spark: read as an RDD, written as a DataFrame."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hvd_cluster.data.spark_jobs import is_connect
from hvd_cluster.petastorm.factories import make_reader
from hvd_cluster.petastorm.location import Url
from hvd_cluster.petastorm.unischema import Unischema
from hvd_cluster.petastorm.writer import generated_metadata

logger = logging.getLogger(__name__)

_MIB = 1 << 20
#: Parquet's own setting in Hadoop's configuration.
_BLOCK_SIZE = "parquet.block.size"


@contextmanager
def materialize_dataset(
    spark: Any,
    dataset_url: Url,
    schema: Unischema,
    row_group_size_mb: int | None = None,
    use_summary_metadata: bool = False,
    filesystem_factory: Callable[[], Any] | None = None,
) -> Iterator[None]:
    """A context in which Spark writes encoded rows to a folder.

    Its end writes petastorm's metadata beside them.

    ::

        with materialize_dataset(spark, url, schema, row_group_size_mb=64):
            rows = spark.sparkContext.parallelize(items).map(lambda item: dict_to_spark_row(schema, to_dict(item)))
            spark.createDataFrame(rows, schema.as_spark_schema()).write.parquet(url)

    Args:
        spark: the session; None where the Parquet is written by other means.
        dataset_url: URL or local path that the driver sees too.
        schema: of the rows, before encoding.
        row_group_size_mb: MiB of a row group while the block runs. A Connect session has no such setting: give it to
            the writer there, ``.option("parquet.block.size", ...)``.
        use_summary_metadata: ignored: row groups are found from the files' footers.
        filesystem_factory: returns a pyarrow or fsspec filesystem for the metadata.

    Raises:
        PetastormMetadataGenerationError: the block wrote no Parquet, or other columns than the schema's.
    """
    with (
        _row_group_size(spark, row_group_size_mb),
        generated_metadata(dataset_url, schema, filesystem=filesystem_factory() if filesystem_factory else None),
    ):
        yield


def dataset_as_rdd(
    dataset_url: Url, spark_session: Any, schema_fields: Any = None, hdfs_driver: str = "libhdfs"
) -> Any:
    """The decoded rows of a petastorm data set, as an RDD of dicts.

    Executors read what they are given.

    Args:
        dataset_url: URL or path that every executor sees.
        spark_session: a classic session: Connect has no RDDs.
        schema_fields: as ``make_reader`` takes them.
        hdfs_driver: ignored.
    """
    with make_reader(dataset_url, schema_fields, reader_pool_type="dummy") as reader:
        num_shards = reader.diagnostics["pieces"]

    def read(shard: int) -> list[dict[str, Any]]:
        options: dict[str, Any] = {"cur_shard": shard, "shard_count": num_shards, "reader_pool_type": "dummy"}
        with make_reader(dataset_url, schema_fields, **options) as rows:
            return [row._asdict() for row in rows]

    return spark_session.sparkContext.parallelize(range(num_shards), num_shards).flatMap(read)


@contextmanager
def _row_group_size(spark: Any, size_mb: int | None) -> Iterator[None]:
    if spark is None or size_mb is None:
        yield
        return
    java_context = None if is_connect(spark) else getattr(spark.sparkContext, "_jsc", None)
    if java_context is None:
        logger.warning(
            'a Connect session cannot set the size of row groups: write with .option("parquet.block.size", %d)',
            size_mb * _MIB,
        )
        yield
        return
    configuration = java_context.hadoopConfiguration()
    before = configuration.get(_BLOCK_SIZE)
    configuration.set(_BLOCK_SIZE, str(int(size_mb * _MIB)))
    try:
        yield
    finally:
        if before is None:
            configuration.unset(_BLOCK_SIZE)
        else:
            configuration.set(_BLOCK_SIZE, before)
