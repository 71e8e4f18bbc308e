"""What all estimators share: check, write the data, run workers, make the model."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import logging
import secrets
import sys
import tempfile
import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvd_cluster.data.dataset import Dataset
from hvd_cluster.data.preprocessing import Preprocess
from hvd_cluster.data.store import Store
from hvd_cluster.errors import DataError, WorkerFailedError
from hvd_cluster.estimators.backend import Backend, LocalBackend, SparkBackend, as_backend
from hvd_cluster.estimators.column_roles import ColumnRoles
from hvd_cluster.estimators.driver import DriverRun
from hvd_cluster.estimators.fit_data import FitData, FrameData, Layout, Prepared, StoredParquet
from hvd_cluster.estimators.frames import Frame, column_names, kind_of, pinned
from hvd_cluster.estimators.logged_model.first_rows import MAX_ROWS
from hvd_cluster.estimators.model import FittedModel
from hvd_cluster.estimators.params import EstimatorParams
from hvd_cluster.estimators.run.epochs import EpochListener
from hvd_cluster.estimators.run.fingerprint import Fingerprint
from hvd_cluster.estimators.run.row_transform import RowTransform
from hvd_cluster.estimators.run_lease import RunLease
from hvd_cluster.estimators.scoring.output_columns import metadata_of
from hvd_cluster.estimators.spec import FitSpec
from hvd_cluster.estimators.stages.spark_ml import Estimator
from hvd_cluster.estimators.trial_rows import TrialRows
from hvd_cluster.estimators.view import tracking
from hvd_cluster.estimators.view.fit_log import LossWatch
from hvd_cluster.estimators.view.progress_bar import FitProgressBar

if TYPE_CHECKING:
    from hvd_cluster.estimators.run.checkpoint import Checkpoint

logger = logging.getLogger(__name__)

_NO_CHECKPOINTS_TEXT = (
    "this fit has no progress bar and no checkpoints: its workers cannot open a connection to this process, as on a "
    "remote Spark Connect server; if one dies, training restarts. Give the fit a store that the driver and all "
    'workers see, such as store="s3://bucket/work"'
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preflight:
    """A fit that has passed every check that can be made before its rows are written."""

    backend: Backend
    store: Store
    lease: RunLease
    run_id: str
    layout: Layout
    #: What the run resumes from, if anything.
    checkpoint: Checkpoint | None
    #: Workers report to the driver through files in the store.
    reports_through_store: bool


class DistributedEstimator(ColumnRoles, EstimatorParams, Estimator):
    """Base of the estimators; each framework implements the abstract methods."""

    #: First part of generated run ids.
    run_prefix = "run"
    #: What the factory of ``model=`` has made in the driver: before the workers start, and again for the fitted model.
    _made: Any = None

    @abstractmethod
    def _train_spec(self, trial: TrialRows, store: Store, run_id: str) -> Any:
        """The run's ``FitSpec`` for the data set of ``trial``, after a trial on its rows."""

    @abstractmethod
    def _checkpoint(self, store: Store, run_id: str) -> Checkpoint | None:
        """The run's checkpoint, after a trial on model and optimizer; None without one.

        Raises:
            DataError: it is of another model or optimizer, or not a checkpoint.
        """

    def _kept_text(self, found: Checkpoint, spec: Any, num_proc: int) -> str:
        """The run's params that ``num_proc`` workers keep although the fit has others."""
        return ""

    @abstractmethod
    def _train_fn(self) -> Callable[[Any], Any]:
        """The importable function that trains a spec; rank 0's result has a ``history``."""

    @abstractmethod
    def _create_model(self, results: list[Any], spec: Any) -> Any:
        """The model, from the workers' results."""

    @abstractmethod
    def get_model_class(self) -> type[Any]:
        """The class of the fitted model. Subclasses may override it."""

    def _fit(self, dataset: Any) -> Any:
        dataset = pinned(dataset)
        kind, names = kind_of(dataset), column_names(dataset)
        backend = self._backend_for(kind, dataset)
        data = FrameData(
            kind=kind,
            data=dataset,
            backend=backend,
            has_store=self._value("store") is not None,
            has_module=self._value("data_module") is not None,
            validation=self._value("validation") or None,
        )
        data.require_store()
        self._check(names, has_validation=False)
        return self._fit_data(data, names, backend)

    def fit_on_parquet(self, params: Any = None, dataset_idx: int | str | None = None) -> Any:
        """Fit the Parquet that is already at the store's training and validation paths.

        Args:
            params: a param map, or a list of them, as in :meth:`fit`.
            dataset_idx: which data set of the store; what ``prepare_data`` yields.

        Returns:
            The model, or a list of models for a list of param maps.

        Raises:
            ValueError: as in :meth:`fit`, and if there is no store.
            DataError: no Parquet can be read there.
        """
        if isinstance(params, (list, tuple)):
            return [self.fit_on_parquet(one, dataset_idx) for one in params]
        if params:
            return self.copy(params).fit_on_parquet(None, dataset_idx)
        if self._value("store") is None:
            raise ValueError("fit_on_parquet needs a store: it reads the data at the store's paths")
        data = StoredParquet(Store.create(self._value("store")), dataset_idx)
        names, backend = data.column_names(), as_backend(self._get_or_create_backend())
        self._check(names, has_validation=True)
        return self._fit_data(data, names, backend)

    def _fit_data(self, data: FitData, names: list[str], backend: Backend) -> Any:
        """Check all that can be checked, write the rows, run workers, make the model."""
        with (
            self._preflight(data, names, backend) as ready,
            self._naming_checkpoint(ready.store, ready.run_id),
            data.prepared(ready.store, ready.lease.token, ready.layout) as prepared,
            tracking.tracked(self, ready.run_id) as tracker,
        ):
            trial = self._trial_rows(prepared.dataset, ready.layout.seed)
            spec = dataclasses.replace(
                self._train_spec(trial, ready.store, ready.run_id),
                part_dirs=prepared.part_dirs,
                store_on_driver=data.keeps_with_driver,
                report_through_store=ready.reports_through_store,
            )
            if ready.checkpoint is not None:
                self._check_resumed(ready.checkpoint, spec, prepared, ready.layout.num_proc)
            # Now: what cannot be read must not end a fit whose training is over.
            columns = tuple(dict.fromkeys(spec.inputs.feature_cols))
            given, is_made = data.first_rows(columns, MAX_ROWS), self._value("preprocess") is not None
            read = trial.table(columns) if given is None or is_made else given
            self._made = None  # the workers may need the memory
            model = self._create_model(self._driver_run(ready, prepared, tracker).results(spec), spec)
            if isinstance(model, FittedModel):  # subclasses may return something else
                nullable = data.nullable(self._raw_columns(list(columns)))
                model.keep_rows(read if given is None else given, nullable, read.schema)
            tracker.finish(model)
            return model

    @contextlib.contextmanager
    def _preflight(self, data: FitData, names: list[str], backend: Backend) -> Iterator[Preflight]:
        """The checks of a fit before its rows are written; the context holds the run."""
        self._check_picklable()
        run_id = self._value("run_id") or _new_run_id(self.run_prefix)
        self._say(f"{run_id}: checking the data, and the model on a few rows")
        given_seed = self._value("random_seed")
        # From the run id, so that a resumed run splits and shuffles as before.
        seed = zlib.crc32(run_id.encode()) if given_seed is None else given_seed
        is_out_of_reach, has_store = backend.driver_is_out_of_reach, self._value("store") is not None
        with self._opened_store(save_runs=not (data.keeps_with_driver and is_out_of_reach)) as store:
            if not store.saving_runs() and not has_store:
                logger.warning("%s", _NO_CHECKPOINTS_TEXT)
            store.check_writable()
            with RunLease(store, run_id, exclusive=store.saving_runs(), is_shared=has_store) as lease:
                checkpoint = self._checkpoint(store, run_id)
                backend.check()
                layout = Layout(
                    columns=self._columns(names),
                    num_proc=backend.num_processes(),
                    partitions_per_process=self._value("partitions_per_process"),
                    seed=seed,
                    allow_ragged=self._value("transformation_fn") is not None,
                    raw=self._raw_columns(names),
                )
                with data.sample(layout) as sample:
                    if sample is not None:
                        self._train_spec(self._trial_rows(sample, seed), store, run_id)
                backend.check_unpickles(self._fit_name, self._unpickled_params())
                self._say(f"{run_id}: preparing the rows")
                yield Preflight(
                    backend=backend,
                    store=store,
                    lease=lease,
                    run_id=run_id,
                    layout=layout,
                    checkpoint=checkpoint,
                    reports_through_store=is_out_of_reach and has_store,
                )

    def _say(self, text: str) -> None:
        """Show what a fit does before its progress bar, unless it is silent."""
        if self._value("verbose") > 0:
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()

    @contextlib.contextmanager
    def _naming_checkpoint(self, store: Store, run_id: str) -> Iterator[None]:
        """Say what a fit that failed or was interrupted can resume from."""
        try:
            yield
        except WorkerFailedError as error:
            error.args = (str(error) + self._checkpoint_text(store, run_id),)
            raise
        except KeyboardInterrupt:
            text = self._checkpoint_text(store, run_id) or " It left no checkpoint."
            if self._value("store") is None:
                text += " Resuming needs a store (store=)."
            logger.warning("run %r was interrupted.%s", run_id, text)
            raise

    def _check_resumed(self, found: Checkpoint, spec: Any, prepared: Prepared, num_proc: int) -> None:
        """Check that the data is that of the checkpoint, and log where the run resumes.

        Raises:
            DataError: the run began with other data.
        """
        if prepared.rows is None:  # otherwise the workers compare the rows
            found.trained_on.require(spec.run_id, Fingerprint.of(prepared.dataset, spec.inputs))
        logger.warning("%s", _resumed_text(found, spec))
        if kept := self._kept_text(found, spec, num_proc):
            logger.warning("%s", kept)

    def _driver_run(self, ready: Preflight, prepared: Prepared, tracker: tracking.Tracker) -> DriverRun:
        """What starts the workers, and starts them again when one dies."""
        train_fn, rows = self._train_fn(), prepared.rows
        bar = FitProgressBar(ready.run_id, enabled=self._value("verbose") > 0)
        return DriverRun(
            backend=ready.backend,
            train_fn=train_fn if rows is None else rows.wrapped(train_fn),
            store=ready.store,
            max_restarts=self._value("max_restarts"),
            bar=bar,
            epochs=EpochListener(
                self._value("driver_callbacks"),
                finished=ready.checkpoint.epochs if ready.checkpoint is not None else 0,
                views=[LossWatch(ready.run_id), bar.show_epoch, *tracker.callbacks],
            ),
            require_held=ready.lease.require_held,
            rows=None if rows is None else rows.rows,
        )

    def _fit_fields(self, dataset: Dataset, store: Store, run_id: str, seed: int) -> dict[str, Any]:
        """``FitSpec`` fields by shared params: all but ``inputs`` and ``output_shapes``."""
        value = self._value
        names = ("continuous_cols", "categorical_cols")
        return {
            # Params that the spec has under the same name.
            **{field.name: value(field.name) for field in dataclasses.fields(FitSpec) if field.name in self.param_rows},
            "run_id": run_id,
            "dataset": dataset,
            "store": store,
            "seed": seed,
            "val_batch_size": value("val_batch_size") or value("batch_size"),
            "train_reader_threads": value("train_reader_num_workers"),
            "val_reader_threads": value("val_reader_num_workers"),
            "transformation_fn": self._transformation(),
            "preprocess": self._preprocess(dataset),
            "callbacks": tuple(value("callbacks") or []),
            "data_module_args": {name: value(name) for name in names if value(name) is not None},
        }

    def _transformation(self) -> Callable[[dict[str, Any]], dict[str, Any]] | None:
        """The function from row to row that readers apply."""
        names = ("transformation_fn", "transformation_edit_fields", "transformation_removed_fields")
        return RowTransform.of(*(self._value(name) for name in names))

    def _preprocess(self, dataset: Dataset) -> Preprocess | None:
        """The function over batches of the feature columns."""
        if self._value("preprocess") is None:
            return None
        return Preprocess(
            fn=self._value("preprocess"),
            columns=tuple(self._feature_columns(list(dataset.schema.names))),
            shared=tuple(self._stored_columns()),
            batch_format=self._value("batch_format"),
            on_error=self._value("on_error"),
        )

    def _trial_rows(self, dataset: Dataset, seed: int) -> TrialRows:
        """The rows that the model is tried on."""
        return TrialRows(
            dataset,
            seed,
            required=self._batch_columns(dataset),
            transformation_fn=self._transformation(),
            preprocess=self._preprocess(dataset),
        )

    def _batch_columns(self, dataset: Dataset) -> tuple[str, ...]:
        """The columns that every training batch must have."""
        features = self._inputs(dataset).feature_cols if self._value("preprocess") is None else ()
        return (*features, *self._stored_columns())

    def _metadata_of(self, spec: Any) -> dict[str, Any]:
        """What the model keeps about its training."""
        return metadata_of(spec)

    def _get_model_kwargs(
        self, model: Any, history: list[dict[str, Any]], optimizer: Any, run_id: str, metadata: dict[str, Any]
    ) -> dict[str, Any]:
        """The arguments of the model class. Subclasses may add to them."""
        return {
            "history": history,
            "model": model,
            "feature_columns": list(metadata["feature_cols"]),
            "label_columns": list(metadata["label_cols"]),
            "output_cols": self._value("output_cols"),
            "output_kinds": self._value("output_kinds"),
            "run_id": run_id,
            "_metadata": metadata,
            **{name: self._value(name) for name in ("preprocess", "batch_format", "on_error")},
        }

    def _checkpoint_text(self, store: Store, run_id: str) -> str:
        """How to resume a failed run, as a line of its own; empty without a checkpoint."""
        if self._value("store") is None:  # its folder is deleted with this fit
            return ""
        try:
            found = self._checkpoint(store, run_id)
        except (OSError, DataError):  # the workers' failure matters more
            return ""
        if found is None:
            return ""
        return (
            f"\nRun {run_id!r} has a checkpoint of epoch {found.epochs} of {self._value('epochs')}: fit again with "
            f"run_id={run_id!r} to resume from it."
        )

    def _get_or_create_backend(self) -> Any:
        """The ``backend`` param, or a SparkBackend of ``num_proc`` workers; overridable."""
        return self._value("backend") or SparkBackend(self._value("num_proc"), verbose=self._value("verbose"))

    def _backend_for(self, kind: Frame, data: Any) -> Backend:
        overridden = type(self)._get_or_create_backend is not DistributedEstimator._get_or_create_backend
        if overridden or self._value("backend") is not None:
            return as_backend(self._get_or_create_backend())
        num_proc, verbose = self._value("num_proc"), self._value("verbose")
        if kind is Frame.SPARK:
            return SparkBackend(num_proc, verbose=verbose, spark=data.sparkSession)
        if kind is Frame.RAY:
            from hvd_cluster.estimators.ray.backend import backend_for

            return backend_for(num_proc, use_gpu=self._value("use_gpu"), verbose=verbose)
        return LocalBackend(num_proc, verbose=verbose)

    @contextlib.contextmanager
    def _opened_store(self, save_runs: bool) -> Iterator[Store]:
        """The opened ``store``, or a temporary folder with checkpoints if ``save_runs``."""
        if self._value("store") is not None:
            yield Store.create(self._value("store"))
            return
        with tempfile.TemporaryDirectory(prefix="hvd_cluster-fit-", ignore_cleanup_errors=True) as folder:
            yield Store.create(Path(folder), save_runs=save_runs)


def _resumed_text(found: Checkpoint, spec: Any) -> str:
    run_id, finished, epochs = spec.run_id, found.epochs, spec.epochs
    if not found.is_over(spec):
        return f"run {run_id!r} resumes after epoch {finished} of {epochs}"
    if finished < epochs:
        return (
            f"run {run_id!r} was stopped after epoch {finished} of {epochs} and has nothing left to train: choose "
            "another run_id to train again"
        )
    return (
        f"run {run_id!r} has finished {finished} of {epochs} epochs and has nothing left to train: raise epochs to "
        "continue, or choose another run_id to train again"
    )


def _new_run_id(prefix: str) -> str:
    now = dt.datetime.now(dt.timezone.utc)
    return f"{prefix}_{now:%Y%m%d_%H%M%S}_{secrets.token_hex(3)}"
