"""``make_reader`` and ``make_batch_reader``: petastorm's ways to read."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hvd_cluster.data import filters as filter_rules
from hvd_cluster.data import spark_jobs
from hvd_cluster.data.optional import load_pyarrow
from hvd_cluster.data.reading.row_groups import RowGroupTables
from hvd_cluster.data.tables.opening import is_table, is_table_at, open_table, require_one_version
from hvd_cluster.data.tables.parquet import ParquetFolder
from hvd_cluster.data.tables.table_source import TableSource
from hvd_cluster.errors import DataError
from hvd_cluster.petastorm import metadata, row_group_index
from hvd_cluster.petastorm.epoch_order import EpochOrder, shard_of
from hvd_cluster.petastorm.errors import NoDataAvailableError
from hvd_cluster.petastorm.fragment_reader import FragmentDecoder
from hvd_cluster.petastorm.fragments import Fragment, fragments_of, parquet_files
from hvd_cluster.petastorm.location import Location, Url, locate
from hvd_cluster.petastorm.options import PetastormOptions
from hvd_cluster.petastorm.predicates import PredicateBase
from hvd_cluster.petastorm.reader import Reader
from hvd_cluster.petastorm.selectors import RowGroupSelectorBase
from hvd_cluster.petastorm.transform import TransformSpec, transform_schema
from hvd_cluster.petastorm.unischema import Unischema
from hvd_cluster.petastorm.unischema_field import UnischemaField

logger = logging.getLogger(__name__)


def make_reader(
    dataset_url: Url | Sequence[Url],
    schema_fields: Sequence[UnischemaField | str] | None = None,
    reader_pool_type: str = "thread",
    workers_count: int = 10,
    pyarrow_serialize: bool = False,
    results_queue_size: int = 50,
    seed: int | None = None,
    shuffle_rows: bool = False,
    shuffle_row_groups: bool = True,
    shuffle_row_drop_partitions: int = 1,
    predicate: PredicateBase | None = None,
    rowgroup_selector: RowGroupSelectorBase | None = None,
    num_epochs: int | None = 1,
    cur_shard: int | None = None,
    shard_count: int | None = None,
    shard_seed: int | None = None,
    cache_type: str | None = "null",
    cache_location: Any = None,
    cache_size_limit: int | None = None,
    cache_row_size_estimate: int | None = None,
    cache_extra_settings: Mapping[str, Any] | None = None,
    hdfs_driver: str = "libhdfs",
    transform_spec: TransformSpec | None = None,
    filters: Any = None,
    storage_options: Mapping[str, Any] | None = None,
    zmq_copy_buffers: bool = True,
    filesystem: Any = None,
    convert_early_to_numpy: bool = False,
) -> Reader:
    """Read a petastorm data set row by row, decoded.

    A Delta, Iceberg or Lance table is read with the types of its columns: the rows of one version, without deleted
    ones. Shards must read one version: call :func:`hvd_cluster.data.open_table` once, and pass its result to them.

    Each row is a namedtuple of NumPy scalars and arrays, ``str``, ``bytes``, ``Decimal`` and None; a null of a
    floating-point scalar is NaN. A data set without petastorm's metadata is read with the schema of its Parquet.

    Args:
        dataset_url: URL or local path of a folder, or a list of those of Parquet files; or a table: its path, its
            object, its name in Spark's catalog, or what ``open_table`` returns.
        schema_fields: the fields to read: UnischemaFields and regular expressions for whole names; None for all.
        reader_pool_type: "thread" or "process" (which is served by threads too: decoding holds no GIL), or "dummy" to
            read in the caller's thread.
        workers_count: threads, 32 at most.
        results_queue_size: maximum row groups that wait; they take at most 256 MiB, or are a single larger one.
        seed: chooses the orders, and which shard gets which row groups; None draws an order that no run repeats, and
            distributes the row groups in the order of the data. All shards must get the same seed.
        shuffle_rows: whether to shuffle the rows of a row group.
        shuffle_row_groups: whether to shuffle row groups, again in each pass.
        shuffle_row_drop_partitions: parts to cut each row group into, which are shuffled by themselves.
        predicate: which rows to give, from the values of one row.
        rowgroup_selector: which row groups to read, from petastorm's index.
        num_epochs: passes; None for no end.
        cur_shard, shard_count: which share of the row groups to read.
        shard_seed: distributes the row groups; default is ``seed``.
        cache_type: "null", or "local-disk" to keep what was read in ``cache_location``, up to ``cache_size_limit``
            bytes, until the reader's end (or longer with ``cache_extra_settings={"cleanup": False}``).
        transform_spec: a function over each row, run in the reader's threads.
        filters: pyarrow's filters, ``[(column, operator, value), ...]`` or a list of such lists; rows that do not match
            are not given.
        storage_options: arguments for the fsspec filesystem of the URL.
        filesystem: a pyarrow or fsspec filesystem to use instead.
        pyarrow_serialize, cache_row_size_estimate, hdfs_driver, zmq_copy_buffers, convert_early_to_numpy:
            ignored.

    Raises:
        DataError: an argument makes no sense, or there is no Parquet.
        PetastormMetadataError: the metadata is damaged, or its pickled schema asks for more than a schema.
        NoDataAvailableError: there are fewer row groups than shards, or nothing is selected.
    """
    return _make(PetastormOptions.of(locals()), dataset_url, storage_options, filesystem, batched=False)


def make_batch_reader(
    dataset_url_or_urls: Url | Sequence[Url],
    schema_fields: Sequence[UnischemaField | str] | None = None,
    reader_pool_type: str = "thread",
    workers_count: int = 10,
    results_queue_size: int = 50,
    seed: int | None = None,
    shuffle_rows: bool = False,
    shuffle_row_groups: bool = True,
    shuffle_row_drop_partitions: int = 1,
    predicate: PredicateBase | None = None,
    rowgroup_selector: RowGroupSelectorBase | None = None,
    num_epochs: int | None = 1,
    cur_shard: int | None = None,
    shard_count: int | None = None,
    shard_seed: int | None = None,
    cache_type: str | None = "null",
    cache_location: Any = None,
    cache_size_limit: int | None = None,
    cache_row_size_estimate: int | None = None,
    cache_extra_settings: Mapping[str, Any] | None = None,
    hdfs_driver: str = "libhdfs",
    transform_spec: TransformSpec | None = None,
    filters: Any = None,
    storage_options: Mapping[str, Any] | None = None,
    zmq_copy_buffers: bool = True,
    filesystem: Any = None,
    convert_early_to_numpy: bool = False,
) -> Reader:
    """Read any Parquet batch by batch, a row group at a time.

    A batch is a namedtuple of NumPy arrays of n rows.

    Args:
        schema_fields: regular expressions for whole names of columns; None for all.
        predicate: which rows to give, from a pandas DataFrame of n rows: n bools.
        transform_spec: a function from DataFrame to DataFrame, run in the reader's threads; columns that it makes or
            changes are declared in ``edit_fields``.
        dataset_url_or_urls: and all other arguments: as :func:`make_reader` takes them.

    Raises:
        DataError: an argument makes no sense, or there is no Parquet.
        NoDataAvailableError: there are fewer row groups than shards, or nothing is selected.
    """
    return _make(PetastormOptions.of(locals()), dataset_url_or_urls, storage_options, filesystem, batched=True)


def _make(options: PetastormOptions, source: Any, storage_options: Any, filesystem: Any, *, batched: bool) -> Reader:
    table = table_of(source, filesystem, storage_options)
    if table is not None:
        require_one_version(table, source, options.shard_count or 1, "shards")
    location = locate(source, storage_options, filesystem) if table is None else None
    stored = None if batched or location is None else metadata.stored_schema(location)
    texts = {name for name, field in stored.fields.items() if field.numpy_dtype is np.str_} if stored else set()
    if location is not None:
        table = ParquetFolder(location.filesystem, parquet_files(location), texts=texts)
    assert table is not None
    text = table.name if location is None else location.text
    folder_types = table.folder_types if isinstance(table, ParquetFolder) else {}
    # Columns that only folders name come first, as in petastorm.
    fields = sorted(table.arrow_schema, key=lambda field: field.name not in folder_types)
    whole = stored or Unischema.from_arrow_schema(load_pyarrow().schema(fields))
    schema = _view(whole, options.schema_fields, text)
    if options.predicate is not None:
        unknown = sorted(set(options.predicate.get_fields()) - set(whole.fields))
        if unknown:
            raise DataError(f"the predicate looks at {unknown}, but {text} has the fields {list(whole.fields)}")
    output = schema if options.transform_spec is None else transform_schema(schema, options.transform_spec)
    spec = options.transform_spec
    if (
        spec is not None
        and spec.func is None
        and (made := [name for name in output.fields if name not in schema.fields])
    ):
        raise DataError(f"the transform's edit_fields name {made}, which nothing makes: give it a func")
    extra = sorted(options.predicate.get_fields()) if options.predicate is not None else ()
    names = list(dict.fromkeys([*schema.fields, *extra]))
    table.require(names)
    row_filter = filter_rules.parse(options.filters)
    cache = options.cache()
    reader = FragmentDecoder(
        tables=RowGroupTables(table.reader, names, row_filter, cache, snapshot=table.snapshot),
        folder_types=folder_types,
        schema=schema,
        whole_schema=whole,
        output=output,
        decode=not batched,
        predicate=options.predicate,
        transform=spec,
        cache=cache,
    )
    fragments = fragments_of(table, names, row_filter, options.shuffle_row_drop_partitions)
    fragments = _selected(fragments, reader, options, location, text)
    deal_seed = options.shard_seed if options.shard_seed is not None else options.seed
    fragments = shard_of(fragments, options.cur_shard, options.shard_count, deal_seed)
    order = EpochOrder(
        fragments=tuple(fragments),
        num_epochs=options.num_epochs,
        seed=secrets.randbits(62) if options.seed is None else options.seed,
        shuffle_fragments=options.shuffle_row_groups,
        shuffle_rows=options.shuffle_rows,
    )
    if options.reader_pool_type == "process":
        logger.debug("threads serve reader_pool_type='process'")
    return Reader(
        reader, order, batched=batched, num_threads=options.num_threads, queue_size=options.results_queue_size
    )


def table_of(
    source: Any, filesystem: Any = None, storage_options: Mapping[str, Any] | None = None
) -> TableSource | None:
    """The table that a user gives as an object, path or name; None for Parquet paths."""
    is_path = isinstance(source, (str, os.PathLike)) and bool(os.fspath(source))
    is_name = filesystem is None and spark_jobs.is_table_name(source)
    if is_table(source) or is_name or (is_path and is_table_at(source, filesystem, storage_options)):
        return open_table(source, filesystem=filesystem, storage_options=storage_options)
    return None


def _view(schema: Unischema, schema_fields: Any, text: str) -> Unischema:
    if schema_fields is None:
        schema_fields = list(schema.fields.values())
    if isinstance(schema_fields, (str, UnischemaField)) or not isinstance(schema_fields, Sequence):
        raise DataError(
            f"schema_fields is a {type(schema_fields).__name__}: give a list of UnischemaFields and regular "
            "expressions (windows over time, NGram, are not served)"
        )
    view = schema.create_schema_view(schema_fields)
    if not view.fields:
        raise DataError(f"no field of {text} matches {list(schema_fields)}: it has {list(schema.fields)}")
    return view


def _selected(
    fragments: list[Fragment], reader: FragmentDecoder, options: PetastormOptions, location: Location | None, text: str
) -> list[Fragment]:
    """The row groups that may have rows for the user, before they are sharded."""
    if options.rowgroup_selector is not None:
        if location is None:
            raise DataError(f"{text} has no index of petastorm's for rowgroup_selector: use filters=")
        indexes = row_group_index.read(location)
        missing = [name for name in options.rowgroup_selector.get_index_names() if name not in indexes]
        if missing:
            raise DataError(f"{text} has no index {missing}: it has {sorted(indexes)}")
        numbers = options.rowgroup_selector.select_row_groups(indexes)
        fragments = [fragment for fragment in fragments if fragment.number in numbers]
    predicate = options.predicate
    if predicate is not None and set(predicate.get_fields()) <= set(reader.folder_types) and reader.decode:
        fragments = [fragment for fragment in fragments if predicate.do_include(reader.folder_values(fragment))]
    if not fragments:
        raise NoDataAvailableError(f"no row group of {text} has rows that are selected")
    return fragments
