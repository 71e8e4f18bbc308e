"""How the rows of a fit get to its workers: through a store, with the workers' own start, or from where they lie."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hvd_cluster.data.dataset import Dataset
from hvd_cluster.data.files.filesystems import normalize
from hvd_cluster.data.materializing import materialize
from hvd_cluster.data.store import Store
from hvd_cluster.estimators.backend import Backend, takes_rows
from hvd_cluster.estimators.frames import Frame


@dataclass(frozen=True)
class Prepared:
    """Data on its way to the workers."""

    #: What they read; where ``rows`` are given, a few rows of the same columns, to try the model on.
    dataset: Dataset
    #: Rows that go to the workers without a store; see :class:`hvd_cluster.estimators.run.direct_rows.DirectRows`.
    rows: Any = None
    #: Folders that hold exactly the training rows and the validation rows (None: there are none), for programs that
    #: read folders themselves; None where there are no such folders.
    part_dirs: tuple[str, str | None] | None = None


@dataclass(frozen=True, kw_only=True)
class DataPlan:
    """What decides how the rows of a fit travel."""

    kind: Frame
    backend: Backend
    #: The user named a store.
    has_store: bool
    #: A data module of the user's own reads the rows.
    has_module: bool
    #: Share of the rows, name of a column, or None.
    validation: float | str | None

    @property
    def keeps_with_driver(self) -> bool:
        """Whether workers see nothing of what the driver keeps for a fit without a store."""
        return not self.has_store and (self.kind is Frame.SPARK or self.backend.is_far)

    @property
    def writes_rows(self) -> bool:
        """Whether the rows may have to be written before the workers start."""
        if self.kind is Frame.PARQUET:
            return self._copies_parquet or self.has_module
        return self.kind is not Frame.SPARK or self.has_store

    def require_store(self) -> None:
        """Raise where these rows cannot get to the workers without a store.

        Raises:
            ValueError: so it is, and there is none.
        """
        if self.has_store:
            return
        name = type(self.backend).__name__
        if self.kind is Frame.SPARK and not takes_rows(self.backend):
            reason = f"{name} does not bring the rows of a Spark DataFrame to its workers"
        elif self.kind is Frame.SPARK and self.has_module:
            reason = "a data_module reads Parquet, and without a store the rows of a Spark DataFrame come as none"
        elif self.kind in (Frame.PANDAS, Frame.ARROW) and self.backend.is_far:
            reason = f"the workers of {name} are on other machines, and do not see what this one writes to its own disk"
        elif self.kind is Frame.PARQUET and self.backend.is_far and self._copies_parquet:
            reason = (
                f"the workers of {name} are on other machines, and this Parquet cannot be read where it is: each of "
                "its parts has to be written to files of its own"
            )
        else:
            return
        raise ValueError(
            f"store is required: {reason}; give a folder that the driver and all workers see, such as "
            'store="s3://bucket/work"'
        )

    @property
    def _copies_parquet(self) -> bool:
        return isinstance(self.validation, str) or (self.has_module and self.validation is not None)

    @contextlib.contextmanager
    def prepared(self, data: Any, store: Store, name: str, **given: Any) -> Iterator[Prepared]:
        """The rows of ``data``, for as long as the context lasts.

        Args:
            data: of this ``kind``; for a Ray Dataset its parts.
            store: where to write what has to be written.
            name: id of the data set that is written there.
            given: arguments of ``materialize``.
        """
        given = {**given, "validation": self.validation, "tensors_only": not given["allow_ragged"]}
        if self.kind is Frame.SPARK and not self.has_store:
            from hvd_cluster.estimators.spark.direct_rows import direct_rows

            sample, rows = direct_rows(data, store, **given)
            try:
                yield Prepared(sample, rows)
            finally:
                rows.release()
            return
        written = materialize(data, store, dataset_id=name, own_folders=self.has_module, **given)
        try:
            yield Prepared(written, part_dirs=self._part_dirs(data, written, store, name))
        finally:
            written.remove()

    def _part_dirs(self, data: Any, dataset: Dataset, store: Store, name: str) -> tuple[str, str | None] | None:
        if not self.has_module:
            return None
        if not dataset.folders:  # one folder, of which nothing is held out
            return normalize(os.fspath(data)), None
        return store.get_train_data_path(name), store.get_val_data_path(name) if dataset.validation else None
