"""The user's data, in any form -> checked Parquet in the store.

It is split into training and validation.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import socket
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hvd_cluster.data import schema_spark, spark_jobs
from hvd_cluster.data.columns.pandas_table import to_table
from hvd_cluster.data.dataset import Dataset, Split
from hvd_cluster.data.files.filesystems import normalize, unwritable_text
from hvd_cluster.data.optional import load_pyarrow
from hvd_cluster.data.reading.parquet_files import SUCCESS
from hvd_cluster.data.reading.table_columns import TableColumns
from hvd_cluster.data.row_group import RowGroup
from hvd_cluster.data.schema import Schema, infer, missing_columns_text
from hvd_cluster.data.spark_jobs import map_batches, quoted
from hvd_cluster.data.store import Store
from hvd_cluster.data.tables import spark_catalog
from hvd_cluster.data.tables.opening import is_table, open_table
from hvd_cluster.data.tables.parquet import ParquetFolder
from hvd_cluster.data.tables.table_source import TableSource
from hvd_cluster.data.writing import column_stats, content_address, retention
from hvd_cluster.data.writing import validation as validation_rule
from hvd_cluster.data.writing.assembly import NO_ROWS_TEXT, assembled, checked, parts_of
from hvd_cluster.data.writing.content_address import PLANS
from hvd_cluster.data.writing.folders import DatasetFolders, FoldersTakenError
from hvd_cluster.data.writing.in_place import address_of, in_place, of_snapshot
from hvd_cluster.data.writing.part_writer import MAX_GROUP_ROWS, PartPlan, PartReport, RemoteParts, write_part
from hvd_cluster.data.writing.progress import FinishedParts, Progress, counted
from hvd_cluster.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger(__name__)

#: Row groups smaller than this cost more in bookkeeping than they bring in sharing; ranks share them by row ranges.
_MIN_GROUP_ROWS = 256

__all__ = ["Dataset", "RowGroup", "Split", "materialize"]


def materialize(
    data: Any,
    store: Store | str | os.PathLike[str],
    *,
    columns: Sequence[str],
    validation: float | str | None = None,
    num_proc: int = 1,
    partitions_per_process: int = 10,
    seed: int = 0,
    dataset_id: str | None = None,
    allow_ragged: bool = False,
    float32: bool = False,
    reuse: bool = False,
    own_folders: bool = False,
    in_place: bool = True,
    tensors_only: bool = False,
    raw: Collection[str] = (),
    progress: Progress | None = None,
) -> Dataset:
    """Make data ready to train on.

    A Spark DataFrame (classic or Connect) is written by its executors, in one job; a pandas DataFrame or an Arrow
    table by this process; Parquet is used where it is, unless a validation column mixes both parts in one row group
    or ``own_folders`` or ``in_place`` ask for more.

    The same data gives the same rows in the same order and the same split, whatever ``num_proc`` is, as long as Spark
    delivers its partitions in the same way.

    Args:
        data: Spark or pandas DataFrame, ``pyarrow.Table``, the path or URL of a Parquet file or folder, a table as
            :func:`~hvd_cluster.data.tables.opening.open_table` takes or returns it, "catalog.schema.table" of this
            process's Spark session, or :class:`RemoteParts` of the columns that are needed.
        store: where to write: a store, or its path or URL.
        columns: the columns that are needed: features, labels, weights.
        validation: share of the rows, in [0, 1); or the name of a column, bool or numeric, that is true or > 0 for rows
            to validate on; or None.
        num_proc: ranks that will read; the row groups are sized for them.
        partitions_per_process: row groups (Spark: partitions at most) for each of them.
        seed: of the draw by ratio.
        dataset_id: name of the folders; default is a new one, so that two fits never meet.
        allow_ragged: lists in a column may differ in length; only a ``transformation_fn`` or padding can use them then.
        float32: write (and read, where Parquet is used in place) float64 as float32.
        reuse: name the folders by what the data holds and how it was asked for, and write nothing where they are there
            already. pandas and Arrow data is the same if its bytes are, in any process; Parquet if its files have not
            changed; a Spark DataFrame if Spark says within this session that it has the same plan
            (``DataFrame.sameSemantics``, with the views that its names stand for now) and its input files have not
            changed: a plan that draws at random or calls out gives then the rows that it gave the first time.
            ``Dataset.remove`` leaves such folders to others;
            :func:`hvd_cluster.data.writing.retention.remove_older_than` deletes them.
        own_folders: each part must be all that lies in one folder, for programs that read folders themselves: Parquet
            is used in place only where it is a folder of which nothing is held out.
        in_place: Parquet may be used where it is; False copies it to the folders that ``dataset_id`` names.
        tensors_only: refuse columns of text and bytes, together with what else is wrong.
        raw: columns that are written as they are, whatever they hold, for a function over batches.
        progress: called with the rows that are written, e.g. a :class:`hvd_cluster.data.writing.progress.ProgressBar`.

    Returns:
        The data set. ``Dataset.store`` is the store to read it with: for Parquet in place it may differ from ``store``.

    Raises:
        DataError: columns are missing or of an impossible type, hold nulls or ragged lists, either part is empty, or
            the store cannot be written. All problems of one kind are named at once.
        MissingExtraError: pyarrow is not installed.
    """
    validation = validation_rule.check(validation, columns)
    if num_proc < 1 or partitions_per_process < 1:
        raise DataError(
            f"num_proc is {num_proc} and partitions_per_process {partitions_per_process}: both must be >= 1"
        )
    if not columns:
        raise DataError("no columns were asked for: name the feature and label columns")
    options = _Options(
        columns=tuple(dict.fromkeys(columns)),
        validation=validation,
        num_proc=num_proc,
        num_groups=num_proc * partitions_per_process,
        seed=seed,
        allow_ragged=allow_ragged,
        float32=float32,
        own_folders=own_folders,
        in_place=in_place,
        tensors_only=tensors_only,
        raw=frozenset(raw),
        progress=progress,
    )
    writer = _Materializer(Store.create(store), options, dataset_id, reuse=reuse)
    if spark_jobs.is_table_name(data):
        data = spark_catalog.resolved(data)
    package = type(data).__module__.split(".")[0]
    if isinstance(data, str) or hasattr(data, "__fspath__"):
        return writer.from_path(normalize(data))
    if is_table(data):
        return writer.from_source(open_table(data), writer.store)
    if isinstance(data, RemoteParts):
        return writer.from_parts(data)
    if package == "pyspark":
        return writer.from_spark(data)
    if package == "pandas":
        return writer.from_table(to_table(data, options.read_columns))
    if isinstance(data, load_pyarrow().Table):
        return writer.from_table(data)
    raise DataError(
        f"cannot train on {type(data).__module__}.{type(data).__name__}: give a Spark or pandas DataFrame, a "
        "pyarrow.Table, or the path of Parquet data"
    )


@dataclass(frozen=True, kw_only=True)
class _Options:
    """What one call of `materialize` asks for, whatever the data is."""

    #: The columns that are needed, each once.
    columns: tuple[str, ...]
    validation: float | str | None
    num_proc: int
    #: Row groups over all ranks.
    num_groups: int
    seed: int
    allow_ragged: bool
    float32: bool
    own_folders: bool
    in_place: bool
    tensors_only: bool
    #: Columns that are written as they are.
    raw: frozenset[str]
    progress: Progress | None

    @property
    def read_columns(self) -> list[str]:
        """The columns to take from the data, with the validation column."""
        return [*self.columns, self.validation] if isinstance(self.validation, str) else list(self.columns)

    @property
    def of_address(self) -> dict[str, Any]:
        """What determines, together with the data, what is written."""
        names = ("validation", "num_proc", "num_groups", "seed", "allow_ragged", "float32")
        raw = {"raw": sorted(self.raw)} if self.raw else {}
        return {"columns": list(self.columns), **{name: getattr(self, name) for name in names}, **raw}


class _Materializer:
    """One call of `materialize`, with a method for each kind of data.

    Args:
        store: where to write.
        options: what is asked for.
        dataset_id: name of the folders; None for a new one.
        reuse: name them by what the data holds, where no name is given.
    """

    def __init__(self, store: Store, options: _Options, dataset_id: str | None, *, reuse: bool) -> None:
        self.store = store
        self.options = options
        self.dataset_id = dataset_id or uuid.uuid4().hex
        self.reuse = reuse and dataset_id is None
        #: What is wrong with the columns, as far as their types show.
        self.wrong: list[str] = []

    def from_spark(self, frame: Any) -> Dataset:
        """The data set of a DataFrame, which executors write as Parquet.

        They use the one writer of all ways; a line of JSON for each partition comes back.
        """
        options = self.options
        schema = schema_spark.infer_split(frame.schema, options.columns, options.validation, self.wrong, options.raw)
        self._usable(schema)
        selected = frame.select(*map(quoted, self._countable(frame.columns)))
        if written := self._written_before(lambda: PLANS.address(selected, self.store, self.options.of_address)):
            return written

        def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            from pyspark import TaskContext

            pyarrow = load_pyarrow()
            context = TaskContext.get()
            part = context.partitionId() if context is not None else 0
            yield pyarrow.RecordBatch.from_pydict({"report": [json.dumps(_report(plan, part, batches))]})

        with self._folders(schema, MAX_GROUP_ROWS) as (plan, folders):
            # coalesce only merges neighbours: no shuffle, and the order of the rows stays.
            parts = selected.coalesce(self.options.num_groups)
            with FinishedParts(plan, self.options.progress):
                reports = map_batches(parts, write, "report string")
                collected = spark_jobs.run(frame.sparkSession, reports.collect, "writing rows to train on")
            return self._dataset(plan, parts_of(json.loads(row["report"]) for row in collected), folders)

    def from_parts(self, parts: RemoteParts) -> Dataset:
        """The parts are written where they lie."""
        with self._folders(self._arrow_schema(parts.schema), MAX_GROUP_ROWS) as (plan, folders):
            with FinishedParts(plan, self.options.progress):
                answers = parts.each(functools.partial(_report, plan))
            return self._dataset(plan, parts_of(answers), folders)

    def from_table(self, table: pa.Table) -> Dataset:
        """This process writes."""
        if not table.num_rows:
            raise DataError(NO_ROWS_TEXT)
        schema = self._arrow_schema(table.schema)
        table = table.select(self._countable(table.column_names))
        if written := self._written_before(lambda: content_address.of_table(table, self.options.of_address)):
            return written
        group_rows = max(_MIN_GROUP_ROWS, -(-table.num_rows // self.options.num_groups))
        with self._folders(schema, group_rows) as (plan, folders):
            batches = table.to_batches(max_chunksize=MAX_GROUP_ROWS)
            return self._dataset(plan, [self._written(plan, batches, table.num_rows)], folders)

    def from_path(self, path: str) -> Dataset:
        """Parquet, or a table of another format."""
        within = path == self.store.prefix or path.startswith(f"{self.store.prefix}/")
        store = self.store if within else Store.create(path)
        return self.from_source(open_table(path, filesystem=store), store, is_one_file=store.is_file(path))

    def from_source(self, table: TableSource, store: Store, *, is_one_file: bool = False) -> Dataset:
        """The data set of a table's row groups where they are.

        It is a copy where a validation column mixes the parts, or files do.
        """
        chosen = TableColumns(table, self.options.columns, raw=self.options.raw, wrong=self.wrong)
        if not chosen.rows:
            raise DataError(f"the data in {table.name} has no rows")
        is_folder = isinstance(table, ParquetFolder) and not is_one_file
        mixed = self.options.own_folders and (self.options.validation is not None or not is_folder)
        if isinstance(self.options.validation, str) or mixed or not self.options.in_place:
            return self._copied(chosen)
        seen = chosen.stats()
        self._usable(chosen.schema)
        column_stats.raise_if_any([*self.wrong, *seen.problems(allow_ragged=self.options.allow_ragged)])
        schema = self._narrowed(seen.with_lengths(chosen.schema))
        ratio, num_proc, seed = self.options.validation, self.options.num_proc, self.options.seed
        return checked(in_place(chosen, schema, store, ratio=ratio, num_proc=num_proc, seed=seed), ratio)

    def _copied(self, chosen: TableColumns) -> Dataset:
        table = chosen.table
        schema = self._arrow_schema(table.arrow_schema)
        columns = self._countable(table.arrow_schema.names)
        if written := self._written_before(lambda: address_of(chosen, self.options.of_address)):
            return of_snapshot(written, table.snapshot)
        batches = (
            batch
            for group in chosen.row_groups
            for batch in chosen.read(group, columns).to_batches(max_chunksize=MAX_GROUP_ROWS)
        )
        with self._folders(schema, MAX_GROUP_ROWS) as (plan, folders):
            dataset = self._dataset(plan, [self._written(plan, batches, chosen.rows)], folders)
        return of_snapshot(dataset, table.snapshot)

    def _written_before(self, address: Callable[[], str]) -> Dataset | None:
        """The complete data set of an earlier call; else its address names the folders."""
        if not self.reuse or self.wrong:
            return None
        self.dataset_id = address()
        folder = self.store.get_train_data_path(self.dataset_id)
        dataset = Dataset.load(self.store, folder) if self.store.exists(f"{folder}/{SUCCESS}") else None
        if dataset is not None:
            retention.mark_used(self.store, folder)
            logger.info("the data is in %s already", folder)
        return dataset

    @contextlib.contextmanager
    def _folders(self, schema: Schema, group_rows: int) -> Iterator[tuple[PartPlan, DatasetFolders]]:
        """How to write, and the folders while they are filled."""
        with contextlib.ExitStack() as stack:
            plan = self._plan(schema, group_rows)
            try:
                folders = stack.enter_context(DatasetFolders(self.store, plan.folders))
            except FoldersTakenError:
                if not self.reuse:
                    raise
                # Somebody writes the same data at this moment, or died while doing so: do not wait, leave it to them.
                self.dataset_id, self.reuse = uuid.uuid4().hex, False
                plan = self._plan(schema, group_rows)
                folders = stack.enter_context(DatasetFolders(self.store, plan.folders))
            yield replace(plan, claim=folders.claim), folders

    def _written(self, plan: PartPlan, batches: Any, rows: int) -> PartReport:
        try:
            return write_part(plan, 0, counted(batches, self.options.progress, rows))
        except OSError as error:
            raise DataError(unwritable_text(plan.train_folder, error)) from error

    def _arrow_schema(self, arrow_schema: pa.Schema) -> Schema:
        if isinstance(self.options.validation, str):
            if self.options.validation not in arrow_schema.names:
                missing = [name for name in self.options.read_columns if name not in arrow_schema.names]
                raise DataError(missing_columns_text(missing, arrow_schema.names))
            validation_rule.check_column(self.options.validation, arrow_schema.field(self.options.validation).type)
        return self._usable(infer(arrow_schema, self.options.columns, wrong=self.wrong, raw=self.options.raw))

    def _countable(self, existing: Sequence[str]) -> list[str]:
        """The columns to take from data, which are all where nothing is wrong."""
        if isinstance(self.options.validation, str) and list(existing).count(self.options.validation) != 1:
            column_stats.raise_if_any(self.wrong)
        found = [name for name in self.options.read_columns if not self.wrong or list(existing).count(name) == 1]
        if not found:
            column_stats.raise_if_any(self.wrong)
        return found

    def _usable(self, schema: Schema) -> Schema:
        """The schema; what is wrong waits until nulls have been counted."""
        if self.options.tensors_only and (text := schema.no_tensors_text(self.options.raw)):
            self.wrong.append(text)
        return schema

    def _plan(self, schema: Schema, group_rows: int) -> PartPlan:
        return PartPlan(
            store=self.store,
            schema=self._narrowed(schema),
            train_folder=self.store.get_localized_path(self.store.get_train_data_path(self.dataset_id)),
            validation_folder=self.store.get_localized_path(self.store.get_val_data_path(self.dataset_id)),
            validation=self.options.validation,
            seed=self.options.seed,
            group_rows=min(MAX_GROUP_ROWS, group_rows),
            allow_ragged=self.options.allow_ragged,
            wrong=tuple(self.wrong),
            makes_folders=False,
        )

    def _dataset(self, plan: PartPlan, reports: list[PartReport], folders: DatasetFolders) -> Dataset:
        own = () if self.reuse else plan.folders
        dataset = assembled(plan, reports, self.store, self.options.num_proc, own)
        if self.reuse:
            dataset.save(plan.train_folder)
        parts = [dataset.train] if dataset.validation is None else [dataset.train, dataset.validation]
        folders.complete({group.path for part in parts for group in part.row_groups})
        if self.options.progress is not None:
            rows = sum(part.rows for part in parts)
            self.options.progress(rows, rows)
        return dataset

    def _narrowed(self, schema: Schema) -> Schema:
        return schema.as_float32() if self.options.float32 else schema


def _report(plan: PartPlan, part: int, batches: Iterator[pa.RecordBatch]) -> dict[str, Any]:
    """Write a partition on an executor; the user's errors come back as a message."""
    try:
        return write_part(plan, part, batches).to_json()
    except FileNotFoundError:
        return {
            "error": f"on {socket.gethostname()} there is no {plan.train_folder!r}, which the driver has made: the "
            f"store {plan.store.prefix!r} must be a path or URL that all machines share"
        }
    except OSError as error:
        return {"error": f"on {socket.gethostname()}: {unwritable_text(plan.train_folder, error)}"}
    except DataError as error:
        return {"error": str(error)}
