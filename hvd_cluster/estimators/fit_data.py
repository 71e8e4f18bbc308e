"""The rows of a fit: where they come from, and how they reach the workers."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hvd_cluster.data.columns.pandas_table import to_table
from hvd_cluster.data.dataset import Dataset
from hvd_cluster.data.files.filesystems import normalize
from hvd_cluster.data.files.scratch import scratch_folder
from hvd_cluster.data.local_arrow import write_arrow
from hvd_cluster.data.materializing import materialize
from hvd_cluster.data.reading.parquet_files import files_of
from hvd_cluster.data.reading.table_columns import TableColumns
from hvd_cluster.data.store import Store
from hvd_cluster.data.tables.opening import is_table, open_table
from hvd_cluster.data.tables.parquet import ParquetFolder
from hvd_cluster.errors import DataError
from hvd_cluster.estimators.backend import Backend, takes_rows
from hvd_cluster.estimators.frames import Frame, parquet_columns
from hvd_cluster.estimators.spec import as_warnings

if TYPE_CHECKING:
    import pyarrow as pa

    from hvd_cluster.data.tables.table_source import TableSource
    from hvd_cluster.estimators.run.direct_rows import DirectRows

#: Rows that the model is tried on before all of them are written.
_SAMPLE_ROWS = 32
#: Smaller data in this process's memory is written faster than the model is tried on a sample.
_MIN_SAMPLED_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What is written of the rows, and how; arguments of ``materialize``."""

    columns: Sequence[str]
    num_proc: int
    partitions_per_process: int
    seed: int
    #: Lists in a column may differ in length, and columns may hold text, since a ``transformation_fn`` changes them.
    allow_ragged: bool
    #: Columns that are written as they are, whatever they hold, since ``preprocess`` changes them.
    raw: Sequence[str] = ()


@dataclass(frozen=True)
class Prepared:
    """Rows that workers can read."""

    #: What they read; if ``rows`` is set, only a few rows of the same columns, to try the model on.
    dataset: Dataset
    #: The rows, if they reach the workers without a store.
    rows: DirectRows | None = None
    #: Folders that hold exactly the training rows and the validation rows (None: there are none), for programs that
    #: read folders themselves; None if there are no such folders.
    part_dirs: tuple[str, str | None] | None = None


class FitData(ABC):
    """Where the rows of a fit come from."""

    @property
    def keeps_with_driver(self) -> bool:
        """Whether workers cannot see the driver's folder of a fit without a store."""
        return False

    @contextlib.contextmanager
    def sample(self, layout: Layout) -> Iterator[Dataset | None]:
        """First rows as a data set, for a trial before all are written; None to skip it."""
        yield None

    def first_rows(self, columns: Sequence[str], count: int) -> pa.Table | None:
        """The first rows in the user's types; None if the prepared rows have the same."""
        return None

    def nullable(self, columns: Sequence[str]) -> list[str]:
        """Those of the columns that are not known to be without nulls."""
        return list(columns)

    @abstractmethod
    def prepared(self, store: Store, name: str, layout: Layout) -> contextlib.AbstractContextManager[Prepared]:
        """The rows, for as long as the context lasts.

        Args:
            store: where to write rows that workers cannot read where they are.
            name: id of the data set that is written there.
            layout: what to write.

        Raises:
            DataError: the rows cannot be read, or cannot be trained on.
        """


@dataclass(frozen=True, kw_only=True)
class FrameData(FitData):
    """The rows of a DataFrame, Arrow table, Ray Dataset, Parquet path or other table."""

    kind: Frame
    data: Any
    backend: Backend
    #: The user named a store.
    has_store: bool
    #: A data module of the user's own reads the rows.
    has_module: bool
    #: Share of the rows, name of a column, or None.
    validation: float | str | None

    @property
    def keeps_with_driver(self) -> bool:
        return not self.has_store and (self.kind is Frame.SPARK or self.backend.is_far)

    def require_store(self) -> None:
        """Check that the rows can reach the workers.

        Raises:
            ValueError: they cannot without a store, and there is none.
        """
        if self.has_store:
            return
        name = type(self.backend).__name__
        if self.kind is Frame.SPARK and not takes_rows(self.backend):
            reason = f"{name} does not send the rows of a Spark DataFrame to its workers"
        elif self.kind is Frame.SPARK and self.has_module:
            reason = (
                "a data_module reads Parquet, and without a store the rows of a Spark DataFrame are not written as it"
            )
        elif self.kind in (Frame.PANDAS, Frame.ARROW) and self.backend.is_far:
            reason = f"the workers of {name} are on other machines, and cannot read the local disk of this one"
        elif self.kind is Frame.PARQUET and self.backend.is_far and self._copies_parquet:
            reason = (
                f"the workers of {name} are on other machines, and this Parquet cannot be read where it is: its "
                "training and validation rows must be written to separate files"
            )
        else:
            return
        raise ValueError(
            f"store is required: {reason}; give a folder that the driver and all workers see, such as "
            'store="s3://bucket/work"'
        )

    @contextlib.contextmanager
    def sample(self, layout: Layout) -> Iterator[Dataset | None]:
        """The first rows; None if all are written quickly or these cannot be trained on.

        The check of all rows reports the latter with the counts of all rows.
        """
        with scratch_folder("trial") as folder:
            found = None
            with contextlib.suppress(DataError):
                batches = self._first_batches(list(layout.columns)) if self._writes_rows else None
                if batches is not None:
                    found = write_arrow(
                        batches,
                        folder,
                        columns=layout.columns,
                        allow_ragged=layout.allow_ragged,
                        tensors_only=not layout.allow_ragged,
                        raw=layout.raw,
                    )
            yield found

    @contextlib.contextmanager
    def prepared(self, store: Store, name: str, layout: Layout) -> Iterator[Prepared]:
        given = {**dataclasses.asdict(layout), "validation": self.validation, "tensors_only": not layout.allow_ragged}
        if self.kind is Frame.SPARK and not self.has_store:
            from hvd_cluster.estimators.spark.direct_rows import direct_rows

            sample, rows = direct_rows(self.data, store, **given)
            try:
                yield Prepared(sample, rows)
            finally:
                with as_warnings("the rows of the fit are still persisted in Spark"):
                    rows.release()
            return
        written = materialize(self._parts(layout.columns), store, dataset_id=name, own_folders=self.has_module, **given)
        try:
            yield Prepared(written, part_dirs=self._part_dirs(written, store, name))
        finally:
            with as_warnings(f"the rows of the fit were not removed; delete {', '.join(written.folders)}"):
                written.remove()

    def first_rows(self, columns: Sequence[str], count: int) -> pa.Table | None:
        """The first rows of what is in this process's memory."""
        if self.kind is Frame.PANDAS:
            return to_table(self.data.head(count), columns)
        return self.data.slice(0, count).select(list(columns)) if self.kind is Frame.ARROW else None

    def nullable(self, columns: Sequence[str]) -> list[str]:
        """Columns as in the base class, counting nulls of data in this process's memory."""
        if self.kind is Frame.PANDAS:
            return [str(name) for name, values in self.data.items() if name in columns and values.isna().any()]
        return [name for name in columns if self.kind is not Frame.ARROW or self.data.column(name).null_count]

    @property
    def _copies_parquet(self) -> bool:
        is_split = self.validation is not None or is_table(self.data)
        return isinstance(self.validation, str) or (self.has_module and is_split)

    @property
    def _writes_rows(self) -> bool:
        """Whether rows may be written before the workers start."""
        if self.kind is Frame.PARQUET:
            return self._copies_parquet or self.has_module
        return self.kind is not Frame.SPARK or self.has_store

    def _first_batches(self, columns: list[str]) -> Any:
        """The first rows as Arrow batches, or None."""
        data = self.data
        if self.kind is Frame.SPARK:
            from hvd_cluster.data.spark_jobs import quoted
            from hvd_cluster.estimators.spark.direct_rows import first_batches

            return first_batches(data.select(*map(quoted, columns)))
        if self.kind is Frame.RAY:
            from hvd_cluster.estimators.ray.data import first_table

            return first_table(data.select_columns(columns), _SAMPLE_ROWS).to_batches()
        if self.kind is Frame.PARQUET:
            chosen = TableColumns(self._first_files(), columns)
            if not chosen.rows:
                return None
            return chosen.read(chosen.row_groups[0], columns).slice(0, _SAMPLE_ROWS).to_batches()
        table = self.first_rows(columns, _SAMPLE_ROWS)
        if table is None or not len(table) or table.nbytes / len(table) * len(data) < _MIN_SAMPLED_BYTES:
            return None
        return table.combine_chunks().to_batches()

    def _first_files(self) -> TableSource:
        """Enough files for the first rows: reading all footers may outlast the trial."""
        if is_table(self.data):
            return open_table(self.data)
        store = Store.create(os.fspath(self.data))
        return ParquetFolder(store, files_of(store.fs, [store.get_localized_path(store.prefix)])[:1])

    def _parts(self, columns: Sequence[str]) -> Any:
        """What ``materialize`` takes."""
        if self.kind is not Frame.RAY:
            return self.data
        from hvd_cluster.estimators.ray.data import parts_of, require_shared

        if not self.has_store:
            require_shared()
        return parts_of(self.data, [*columns, *([self.validation] if isinstance(self.validation, str) else [])])

    def _part_dirs(self, dataset: Dataset, store: Store, name: str) -> tuple[str, str | None] | None:
        if not self.has_module:
            return None
        if not dataset.folders:  # a single folder without validation rows
            return normalize(os.fspath(self.data)), None
        return store.get_train_data_path(name), store.get_val_data_path(name) if dataset.validation else None


@dataclass(frozen=True)
class StoredParquet(FitData):
    """Parquet that is already at a store's training and validation paths; only read."""

    store: Store
    dataset_idx: int | str | None

    def column_names(self) -> list[str]:
        """The columns of the training data.

        Raises:
            DataError: no Parquet can be read there.
        """
        path = self.store.get_train_data_path(self.dataset_idx)
        return parquet_columns(self.store, path, f"{path!r}, where the training data should be")

    def dataset(self, columns: Sequence[str], num_proc: int, **options: Any) -> Dataset:
        """The training data, and the validation data if its folder exists.

        Args:
            options: of ``materialize``.

        Raises:
            DataError: the data cannot be read, or holds nulls or ragged lists.
        """
        train_dir, validation_dir = self.part_dirs
        train = materialize(train_dir, self.store, columns=columns, num_proc=num_proc, **options)
        if validation_dir is None:
            return train
        validation = materialize(validation_dir, self.store, columns=columns, num_proc=num_proc, **options)
        return dataclasses.replace(train, validation=validation.train)

    @property
    def part_dirs(self) -> tuple[str, str | None]:
        """The folders of training and validation data, None for absent validation data."""
        validation_dir = self.store.get_val_data_path(self.dataset_idx)
        exists = self.store.exists(validation_dir)
        return self.store.get_train_data_path(self.dataset_idx), validation_dir if exists else None

    @contextlib.contextmanager
    def prepared(self, store: Store, name: str, layout: Layout) -> Iterator[Prepared]:
        options = {name: getattr(layout, name) for name in ("columns", "num_proc", "raw", "allow_ragged")}
        yield Prepared(self.dataset(**options, tensors_only=not layout.allow_ragged), part_dirs=self.part_dirs)
