"""A Spark DataFrame as batches for torch and TensorFlow, in petastorm's API.

It is written once and read by all workers.
"""

from __future__ import annotations

import atexit
import logging
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

from hvd_cluster.data import spark_jobs
from hvd_cluster.data.shard_warning import warn_if_not_own_shard
from hvd_cluster.data.spark_jobs import quoted
from hvd_cluster.data.store import Store
from hvd_cluster.data.tables import spark_catalog
from hvd_cluster.data.tables.parquet import ParquetFolder
from hvd_cluster.data.tables.table_source import TableSource
from hvd_cluster.data.writing.content_address import PlanState
from hvd_cluster.errors import DataError
from hvd_cluster.petastorm.factories import make_batch_reader, table_of
from hvd_cluster.petastorm.fragments import parquet_files
from hvd_cluster.petastorm.location import locate

logger = logging.getLogger(__name__)

#: Spark's setting that says below which folder DataFrames are written.
PARENT_CACHE_DIR_URL_CONF = "petastorm.spark.converter.parentCacheDirUrl"
_CODECS = ("uncompressed", "snappy", "gzip", "lz4", "zstd", "brotli", "bzip2", "deflate")
_DTYPES = {None: "", "float32": "float", "float64": "double"}
_BATCH_SIZE = 32


class SparkDatasetConverter:
    """A DataFrame in Parquet files, and the ways to read it.

    Pickles: workers get one from the driver. ``len(converter)`` is the number of rows. A ``with`` block deletes the
    files at its end.

    Args:
        cache_dir_url: the folder.
        file_urls: the Parquet files in it.
        dataset_size: rows over all files.
    """

    PARENT_CACHE_DIR_URL_CONF = PARENT_CACHE_DIR_URL_CONF

    def __init__(self, cache_dir_url: str, file_urls: Sequence[str], dataset_size: int) -> None:
        self.cache_dir_url = cache_dir_url
        self.file_urls = list(file_urls)
        self.dataset_size = dataset_size

    def __len__(self) -> int:
        return self.dataset_size

    def __enter__(self) -> SparkDatasetConverter:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.delete()

    @contextmanager
    def make_torch_dataloader(
        self,
        batch_size: int = _BATCH_SIZE,
        num_epochs: int | None = None,
        workers_count: int | None = None,
        shuffling_queue_capacity: int = 0,
        data_loader_fn: Callable[..., Any] | None = None,
        **petastorm_reader_kwargs: Any,
    ) -> Iterator[Any]:
        """A context that yields batches as dicts of tensors.

        A tensor has the shape (rows, ...).

        Args:
            batch_size: rows of a batch; the last one may have fewer.
            num_epochs: passes; None for no end.
            workers_count: threads; None for ``make_batch_reader``'s default.
            shuffling_queue_capacity: rows to draw batches from; 0 keeps the reader's order.
            data_loader_fn: called with the reader, ``batch_size`` and ``shuffling_queue_capacity``; default is
                ``hvd_cluster.petastorm.pytorch.DataLoader``.
            petastorm_reader_kwargs: further arguments of ``make_batch_reader``; ``cur_shard`` and ``shard_count`` give
                each worker its own row groups, as petastorm's do. They may hold unequal numbers of rows, and then one
                pass has more batches on some ranks than on others, which never return from a collective: train with
                ``num_epochs=None``, and take ``len(converter) // (batch_size * shard_count)`` batches for an epoch.
        """
        from hvd_cluster.petastorm.pytorch import DataLoader

        make = data_loader_fn or DataLoader
        with (
            self._reader(num_epochs, workers_count, petastorm_reader_kwargs) as reader,
            make(reader, batch_size=batch_size, shuffling_queue_capacity=shuffling_queue_capacity) as loader,
        ):
            yield loader

    @contextmanager
    def make_tf_dataset(
        self,
        batch_size: int | None = None,
        prefetch: int | None = None,
        num_epochs: int | None = None,
        workers_count: int | None = None,
        shuffling_queue_capacity: int | None = None,
        **petastorm_reader_kwargs: Any,
    ) -> Iterator[Any]:
        """A context that yields a ``tf.data.Dataset`` of namedtuples of tensors.

        A tensor has the shape (rows, ...).

        Args:
            batch_size: rows of a batch; None for 32.
            prefetch: batches that TensorFlow takes in advance; None lets it choose.
            num_epochs, workers_count, petastorm_reader_kwargs: as for torch.
            shuffling_queue_capacity: rows to draw batches from; None or 0 keeps the reader's order.

        Raises:
            MissingExtraError: TensorFlow is not installed.
        """
        from hvd_cluster.data.tf_dataset import prefetched
        from hvd_cluster.petastorm.tf_utils import batched_dataset

        with self._reader(num_epochs, workers_count, petastorm_reader_kwargs) as reader:
            dataset = batched_dataset(reader, batch_size or _BATCH_SIZE, shuffling_queue_capacity or 0)
            yield prefetched(dataset, -1 if prefetch is None else prefetch)

    def delete(self) -> None:
        """Delete the files; calling it again does nothing."""
        _delete(self.cache_dir_url)
        _written[:] = [entry for entry in _written if entry[2].cache_dir_url != self.cache_dir_url]

    @property
    def _source(self) -> Any:
        """What ``make_batch_reader`` reads."""
        return self.cache_dir_url

    def _reader(self, num_epochs: int | None, workers_count: int | None, kargs: dict[str, Any]) -> Any:
        if workers_count is not None:
            kargs = {**kargs, "workers_count": workers_count}
        own = "cur_shard=hvd.rank(), shard_count=hvd.size()"
        warn_if_not_own_shard(logger, kargs.get("cur_shard"), kargs.get("shard_count"), own)
        return make_batch_reader(self._source, num_epochs=num_epochs, **kargs)


class _TableConverter(SparkDatasetConverter):
    """A version of a Delta, Iceberg or Lance table, read where it is.

    Nothing deletes it.

    Args:
        table: the version.
    """

    def __init__(self, table: TableSource) -> None:
        super().__init__(
            table.name if table.snapshot is None else table.snapshot.table,
            [],
            sum(group.rows for group in table.fragments(())),
        )
        self._table = table

    @property
    def _source(self) -> Any:
        return self._table

    def delete(self) -> None:
        """Do nothing: the table is the user's."""


def make_spark_converter(
    df: Any,
    parquet_row_group_size_bytes: int = 32 * 1024 * 1024,
    compression_codec: str | None = None,
    dtype: str | None = "float32",
    *,
    parent_cache_dir_url: str | None = None,
) -> SparkDatasetConverter:
    """Write a DataFrame as Parquet, once.

    The same DataFrame over unchanged files is not written again. What was written is deleted when this process exits,
    or by :meth:`SparkDatasetConverter.delete`.

    Args:
        df: a Spark DataFrame, classic or Connect; or the path or URL of Parquet that is already there, which
            :meth:`SparkDatasetConverter.delete` deletes; or a Delta, Iceberg or Lance table (its path, its object, or
            what :func:`hvd_cluster.data.open_table` returns), which stays as it is; or "catalog.schema.table" of this
            process's Spark session.
        parquet_row_group_size_bytes: of a row group.
        compression_codec: of the files; None for uncompressed.
        dtype: "float32" or "float64" casts columns of floating-point numbers, arrays of them and vectors, which become
            arrays; None only turns vectors into arrays.
        parent_cache_dir_url: a folder that driver and workers see; None for what the Spark setting
            ``petastorm.spark.converter.parentCacheDirUrl`` says.

    Raises:
        DataError: an argument makes no sense, no folder is set, or there are no rows.
    """
    if spark_jobs.is_table_name(df):
        df = spark_catalog.resolved(df)
    if (table := table_of(df)) is not None:
        if not any(group.rows for group in table.fragments(())):
            raise DataError(f"{table.name} has no rows")
        return _TableConverter(table)
    if isinstance(df, str) or hasattr(df, "__fspath__"):
        return _converter_of(str(df))
    if compression_codec is not None and compression_codec.lower() not in _CODECS:
        raise DataError(f"compression_codec is {compression_codec!r}: it is one of {', '.join(_CODECS)}, or None")
    if dtype not in _DTYPES:
        raise DataError(f"dtype is {dtype!r}: it is 'float32', 'float64' or None")
    parent = parent_cache_dir_url or df.sparkSession.conf.get(PARENT_CACHE_DIR_URL_CONF, None)
    if not parent:
        raise DataError(
            f"no folder for the DataFrame's files is set: spark.conf.set({PARENT_CACHE_DIR_URL_CONF!r}, "
            "'file:///path/that/all/machines/see')"
        )
    arguments = (parent, parquet_row_group_size_bytes, compression_codec, dtype)
    now = PlanState.of(df)
    for then, known, converter in _written:
        if known == arguments and then.has_rows_of(now):
            return converter
    url = f"{parent.rstrip('/')}/{uuid.uuid4().hex}"
    if not _written:
        atexit.register(_delete_all)
    writer = (
        _cast(df, dtype)
        .write.option("compression", (compression_codec or "uncompressed").lower())
        .option("parquet.block.size", int(parquet_row_group_size_bytes))
    )
    try:
        spark_jobs.run(df.sparkSession, lambda: writer.parquet(url), "writing a DataFrame to be read in batches")
        converter = _converter_of(url)
    except BaseException:  # raised again: half a data set must not stay
        _delete(url)
        raise
    _written.append((now, arguments, converter))
    return converter


def register_delete_dir_handler(handler: Callable[[str], None] | None) -> None:
    """Let a function of yours delete the folders of converters.

    Args:
        handler: called with the URL of a folder; None for our own way.
    """
    global _delete_handler
    _delete_handler = handler


#: What this process has written: the state of the frame; the arguments that decide what is written; the converter.
_written: list[tuple[PlanState, tuple[Any, ...], SparkDatasetConverter]] = []
_delete_handler: Callable[[str], None] | None = None


def _converter_of(url: str) -> SparkDatasetConverter:
    location = locate(url)
    files = parquet_files(location)
    size = sum(group.rows for group in ParquetFolder(location.filesystem, files).fragments(()))
    if not size:
        raise DataError(f"the data in {url} has no rows: check the filters and joins that made it")
    base = url.rstrip("/")
    one_file = len(files) == 1 and files[0][0] == location.paths[0]
    if one_file:
        return SparkDatasetConverter(base, [base], size)
    is_encoded = base.lower().startswith("file:")  # other URLs, and paths, name files as they are
    below = [quote(below) if is_encoded else below for _, below in files]
    return SparkDatasetConverter(base, [f"{base}/{one}" for one in below], size)


def _cast(frame: Any, dtype: str | None) -> Any:
    """The DataFrame with vectors as arrays, and floating-point numbers in the dtype."""
    wanted = _DTYPES[dtype]
    columns = []
    for field in frame.schema.fields:
        # The JSON form is the same in all versions and sessions.
        described = field.dataType.jsonValue()
        kind = described.get("type") if isinstance(described, dict) else described
        column = frame[quoted(field.name)]
        if kind == "udt":
            from pyspark.ml.functions import vector_to_array

            column = vector_to_array(column, dtype or "float64")
        elif wanted and kind in ("float", "double"):
            column = column.cast(wanted)
        elif wanted and kind == "array" and described["elementType"] in ("float", "double"):
            column = column.cast(f"array<{wanted}>")
        columns.append(column.alias(field.name))
    return frame.select(*columns)


def _delete(url: str) -> None:
    if _delete_handler is not None:
        _delete_handler(url)
        return
    store = Store.create(url)
    store.delete(store.prefix)


def _delete_all() -> None:
    while _written:
        _, _, converter = _written.pop()
        try:
            converter.delete()
        except (OSError, DataError):  # the process ends, and others' files are not worth a traceback
            logger.warning("could not delete %s", converter.cache_dir_url)
