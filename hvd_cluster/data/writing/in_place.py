"""A table that is trained on where it is, without a copy."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hvd_cluster.data.dataset import Dataset, Split
from hvd_cluster.data.reading.parquet_files import NUM_THREADS
from hvd_cluster.data.reading.table_columns import TableColumns, held_out
from hvd_cluster.data.row_group import RowGroup
from hvd_cluster.data.schema import Schema
from hvd_cluster.data.store import Store
from hvd_cluster.data.tables.table_source import Snapshot
from hvd_cluster.data.writing import content_address


def in_place(
    chosen: TableColumns, schema: Schema, store: Store, *, ratio: float | None, num_proc: int, seed: int
) -> Dataset:
    """The data set of a table's row groups where they are.

    Without a ratio its validation part is empty.

    Args:
        chosen: the columns.
        schema: the same, with all lengths.
        store: the store of the data set; the table need not be in it.
        ratio: share of the rows to validate on.
        num_proc: ranks that will read.
        seed: of the draw by ratio.
    """
    train, validation = (list(chosen.row_groups), []) if ratio is None else held_out(chosen.row_groups, ratio, seed)

    def split(groups: list[RowGroup]) -> Split:
        whole = Split.of(groups, num_proc)
        return dataclasses.replace(whole, reader=chosen.table.reader, snapshot=chosen.table.snapshot)

    return Dataset(store, schema, split(train), split(validation))


def address_of(chosen: TableColumns, options: Mapping[str, Any]) -> str:
    """The name of a table's rows, written with these options.

    It follows from its snapshot, or from its files as they are now.
    """
    table = chosen.table
    if table.snapshot is not None:
        return content_address.of_text(table.snapshot.key, options)
    paths = dict.fromkeys(group.path for group in chosen.row_groups)
    if any(table.reader.file(path) is None for path in paths):  # nothing says whether the rows have changed
        return uuid.uuid4().hex
    with ThreadPoolExecutor(NUM_THREADS) as pool:  # object stores are far away
        sources = list(pool.map(table.reader.source, paths))
    types = [f"{name}: {table.arrow_schema.field(name).type}" for name in chosen.schema.names]
    return content_address.of_text(repr([sources, types]), options)


def of_snapshot(dataset: Dataset, snapshot: Snapshot | None) -> Dataset:
    """The data set, which is a copy of a snapshot's rows."""
    if snapshot is None:
        return dataset
    train, validation = dataset.train, dataset.validation
    return dataclasses.replace(
        dataset,
        train=dataclasses.replace(train, snapshot=snapshot),
        validation=None if validation is None else dataclasses.replace(validation, snapshot=snapshot),
    )
