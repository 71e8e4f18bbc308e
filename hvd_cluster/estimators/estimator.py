"""What every estimator does, whatever its framework: check, write the data, run the workers, make a model of it."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import logging
import secrets
import tempfile
import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvd_cluster.data.dataset import Dataset
from hvd_cluster.data.reader import ParquetReader
from hvd_cluster.data.schema import missing_columns_text
from hvd_cluster.data.store import Store
from hvd_cluster.errors import DataError, WorkerFailedError
from hvd_cluster.estimators import parquet_folders
from hvd_cluster.estimators.backend import Backend, LocalBackend, SparkBackend, as_backend
from hvd_cluster.estimators.column_roles import ColumnRoles
from hvd_cluster.estimators.data_plan import DataPlan, Prepared
from hvd_cluster.estimators.driver import DriverRun
from hvd_cluster.estimators.first_rows import first_rows
from hvd_cluster.estimators.frames import Frame, column_names, kind_of
from hvd_cluster.estimators.params import EstimatorParams
from hvd_cluster.estimators.run.epochs import EpochListener
from hvd_cluster.estimators.run.fingerprint import Fingerprint
from hvd_cluster.estimators.run.row_transform import RowTransform
from hvd_cluster.estimators.run_lease import RunLease
from hvd_cluster.estimators.scoring.metadata import Metadata
from hvd_cluster.estimators.stages.spark_ml import Estimator
from hvd_cluster.estimators.view import tracking
from hvd_cluster.estimators.view.loss_watch import LossWatch
from hvd_cluster.estimators.view.progress_bar import ProgressBar

if TYPE_CHECKING:
    import torch

    from hvd_cluster.estimators.run.snapshot import Snapshot
    from hvd_cluster.estimators.torch.checkpoint import Checkpoint

logger = logging.getLogger(__name__)

#: Rows of the batch that the model and the loss are tried on.
_PROBE_ROWS = 8

_NO_CHECKPOINTS_TEXT = (
    "this fit has no progress bar and no checkpoints: its workers cannot open a connection to this process, as on a "
    "remote Spark Connect server; if one dies, training begins anew. Give the fit a store that the driver and all "
    'workers see, such as store="s3://bucket/work"'
)
_NO_CACHE_TEXT = (
    "inmemory_cache_all has no effect with reader_pool_type='process': a process beside a worker lives for one pass "
    "over the rows; take reader_pool_type='thread' to keep rows in memory"
)


class DistributedEstimator(ColumnRoles, EstimatorParams, Estimator):
    """Base of the estimators; a framework brings the abstract methods."""

    #: First part of the run ids that are made up.
    run_prefix = "run"

    @abstractmethod
    def _train_spec(self, dataset: Dataset, store: Store, run_id: str, seed: int) -> Any:
        """The spec (a ``FitSpec``) of the run over the materialised ``dataset``, tried on a few rows."""

    @abstractmethod
    def _checkpoint(self, store: Store, run_id: str) -> Checkpoint | Snapshot | None:
        """The run's checkpoint, tried on the model and the optimizer; None where there is none.

        Raises:
            DataError: it is of another model or optimizer, or no checkpoint at all.
        """

    @abstractmethod
    def _train_fn(self) -> Callable[[Any], Any]:
        """The importable function that trains from the spec, in a worker; rank 0's result has a ``history``."""

    @abstractmethod
    def _create_model(self, results: list[Any], spec: Any) -> Any:
        """The model from what the workers returned."""

    @abstractmethod
    def get_model_class(self) -> type[Any]:
        """The class of the fitted model; subclasses may bring their own."""

    def _fit(self, dataset: Any) -> Any:
        kind, names = kind_of(dataset), column_names(dataset)
        backend = self._backend_for(kind, dataset)
        delivery = DataPlan(
            kind=kind,
            backend=backend,
            has_store=self._value("store") is not None,
            has_module=self._value("data_module") is not None,
            validation=self._value("validation") or None,
        )
        delivery.require_store()

        @contextlib.contextmanager
        def prepared(store: Store, name: str, seed: int) -> Iterator[Prepared]:
            data = dataset
            if kind is Frame.RAY:
                from hvd_cluster.estimators.ray import data as ray_data

                ray_data.require_shared(self._value("store"))
                data = ray_data.parts_of(dataset, self._read_columns(names))
            with delivery.prepared(
                data,
                store,
                name,
                columns=self._columns(names),
                num_proc=backend.num_processes(),
                partitions_per_process=self._value("partitions_per_process"),
                seed=seed,
                allow_ragged=self._value("transformation_fn") is not None,
            ) as ready:
                yield ready

        def try_first(store: Store, run_id: str, seed: int) -> None:
            if not delivery.writes_rows:
                return
            allow_ragged = self._value("transformation_fn") is not None
            with first_rows(kind, dataset, self._columns(names), allow_ragged=allow_ragged) as sample:
                if sample is not None:
                    self._train_spec(sample, store, run_id, seed)

        self._check(names, is_held_out=False)
        return self._fit_prepared(backend, prepared, delivery.keeps_with_driver, try_first)

    def fit_on_parquet(self, params: Any = None, dataset_idx: int | str | None = None) -> Any:
        """Fit the Parquet that lies at the store's paths for training and validation data already.

        Args:
            params: a param map, or a list of such, as :meth:`fit` takes.
            dataset_idx: which data set of the store; what ``prepare_data`` yields.

        Returns:
            The model, or a list of them for a list of param maps.

        Raises:
            ValueError: as :meth:`fit`, and where there is no store.
            DataError: no Parquet can be read there.
        """
        if isinstance(params, (list, tuple)):
            return [self.fit_on_parquet(one, dataset_idx) for one in params]
        if params:
            return self.copy(params).fit_on_parquet(None, dataset_idx)
        if self._value("store") is None:
            raise ValueError("fit_on_parquet needs a store: it reads the data that lies at the store's paths")
        store = Store.create(self._value("store"))
        names = parquet_folders.column_names(store, dataset_idx)

        @contextlib.contextmanager
        def prepared(store: Store, _name: str, _seed: int) -> Iterator[Prepared]:
            columns, num_proc = self._columns(names), backend.num_processes()
            yield Prepared(
                parquet_folders.dataset(store, dataset_idx, columns, num_proc),
                part_dirs=parquet_folders.part_dirs(store, dataset_idx),
            )

        backend = as_backend(self._get_or_create_backend())
        self._check(names, is_held_out=True)
        return self._fit_prepared(backend, prepared, keeps_with_driver=False)

    def _fit_prepared(
        self,
        backend: Backend,
        prepared: Callable[[Store, str, int], contextlib.AbstractContextManager[Prepared]],
        keeps_with_driver: bool,
        try_first: Callable[[Store, str, int], None] | None = None,
    ) -> Any:
        """Fit the data.

        Args:
            backend: runs the workers.
            prepared: writes the data, to a store, under a name, with a seed.
            keeps_with_driver: workers do not see where the driver keeps the run.
            try_first: tries the model on a few rows before that.
        """
        self._check_picklable()
        if self._value("inmemory_cache_all") and self._value("reader_pool_type") == "process":
            logger.warning("%s", _NO_CACHE_TEXT)
        run_id = self._value("run_id") or _new_run_id(self.run_prefix)
        given_seed = self._value("random_seed")
        # By the name of the run, so that resuming it splits and shuffles as before.
        seed = zlib.crc32(run_id.encode()) if given_seed is None else given_seed
        out_of_reach = backend.driver_is_out_of_reach
        with contextlib.ExitStack() as stack:
            store = stack.enter_context(self._opened_store(save_runs=not (keeps_with_driver and out_of_reach)))
            if not store.saving_runs and self._value("store") is None:
                logger.warning("%s", _NO_CHECKPOINTS_TEXT)
            store.check_writable()
            lease = stack.enter_context(self._leased(store, run_id))
            found = self._checkpoint(store, run_id)
            backend.check()
            if try_first is not None:
                try_first(store, run_id, seed)
            backend.check_unpickles(self._fit_name, self._unpickled_params())
            try:
                with prepared(store, lease.token, seed) as data, tracking.tracked(self, run_id) as tracker:
                    spec = dataclasses.replace(
                        self._train_spec(data.dataset, store, run_id, seed),
                        part_dirs=data.part_dirs,
                        store_on_driver=keeps_with_driver,
                        report_through_store=out_of_reach and self._value("store") is not None,
                    )
                    if found is not None:
                        if data.rows is None:  # else the workers see what there is
                            found.require_data(run_id, Fingerprint.of(data.dataset, spec.inputs))
                        logger.warning("%s", _resumed_text(found, spec))
                        if kept := found.kept_text(spec, backend.num_processes()):
                            logger.warning("%s", kept)
                    epochs = EpochListener(
                        self._value("driver_callbacks"),
                        finished=found.epochs if found is not None else 0,
                        views=[LossWatch(run_id), *tracker.callbacks],
                    )
                    with ProgressBar(run_id, enabled=self._value("verbose") > 0) as bar:
                        train_fn = self._train_fn()
                        run = DriverRun(
                            backend=backend,
                            train_fn=train_fn if data.rows is None else data.rows.wrapped(train_fn),
                            store=store,
                            max_restarts=self._value("max_restarts"),
                            bar=bar,
                            epochs=epochs,
                            require_held=lease.require_held,
                            rows=None if data.rows is None else data.rows.rows,
                        )
                        results = run.results(spec)
                    model = self._create_model(results, spec)
                    tracker.finish(model)
                    return model
            except WorkerFailedError as error:
                error.args = (str(error) + self._left_text(store, run_id),)
                raise
            except KeyboardInterrupt:
                left = (
                    self._left_text(store, run_id)
                    or " It left no checkpoint to resume from: that takes a store (store=)."
                )
                logger.warning("run %r was interrupted.%s", run_id, left)
                raise

    def _leased(self, store: Store, run_id: str) -> RunLease:
        """The run as this fit's own, where the store is one that others see."""
        return RunLease(
            store,
            run_id,
            exclusive=store.saving_runs,
            is_shared=self._value("store") is not None,
        )

    def _fit_fields(self, dataset: Dataset, store: Store, run_id: str, seed: int) -> dict[str, Any]:
        """The fields of a ``FitSpec`` that the shared params decide; ``inputs`` and ``output_shapes`` are missing."""
        value = self._value
        same = (
            "batch_size", "epochs", "shuffle", "train_steps_per_epoch", "validation_steps_per_epoch",
            "reader_pool_type", "inmemory_cache_all", "data_module", "gradient_compression",
            "backward_passes_per_step", "scale_lr", "use_gpu", "mp_start_method", "verbose",
            "checkpoint_every_epochs", "checkpoint_every_steps", "terminate_on_nan",
        )  # fmt: skip
        names = ("continuous_cols", "categorical_cols")
        return {
            "run_id": run_id,
            "dataset": dataset,
            "store": store,
            "seed": seed,
            "val_batch_size": value("val_batch_size") or value("batch_size"),
            "train_reader_threads": value("train_reader_num_workers"),
            "val_reader_threads": value("val_reader_num_workers"),
            "transformation_fn": self._transformation(),
            "callbacks": tuple(value("callbacks") or []),
            "data_module_args": {name: value(name) for name in names if value(name) is not None},
            **{name: value(name) for name in same},
        }

    def _transformation(self) -> Callable[[dict[str, Any]], dict[str, Any]] | None:
        """The function from row to row that the readers apply."""
        names = ("transformation_fn", "transformation_edit_fields", "transformation_removed_fields")
        return RowTransform.of(*(self._value(name) for name in names))

    def _first_rows(self, dataset: Dataset, seed: int, *, transformed: bool = True) -> dict[str, torch.Tensor]:
        """A few rows to try the model on: as in a training batch, or as stored, which is how ``transform`` reads them.

        Raises:
            DataError: ``transformation_fn`` failed, or leaves out columns that are needed.
        """
        reader = ParquetReader(
            dataset.train,
            dataset.schema,
            dataset.store,
            batch_size=min(_PROBE_ROWS, dataset.train.rows),
            seed=seed,
            shuffle=False,
            remainder="pad",
            transformation_fn=self._transformation() if transformed else None,
            num_threads=1,
        )
        found = next(reader.epoch(0))
        lost = [name for name in self._batch_columns(dataset) if name not in found]
        if lost:
            raise DataError(f"the rows of transformation_fn lack columns: {missing_columns_text(lost, list(found))}")
        return found

    def _batch_columns(self, dataset: Dataset) -> tuple[str, ...]:
        """The columns that every training batch must have."""
        inputs = self._inputs(dataset)
        return (
            *inputs.feature_cols,
            *inputs.label_cols,
            *([inputs.sample_weight_col] if inputs.sample_weight_col else []),
        )

    def _metadata_of(self, spec: Any) -> dict[str, Any]:
        """What the model keeps of its training."""
        return Metadata.of(spec).to_dict()

    def _get_model_kwargs(
        self, model: Any, history: list[dict[str, Any]], optimizer: Any, run_id: str, metadata: dict[str, Any]
    ) -> dict[str, Any]:
        """The constructor's arguments of the model class; subclasses may add to them."""
        return {
            "history": history,
            "model": model,
            "feature_columns": list(metadata["feature_cols"]),
            "label_columns": list(metadata["label_cols"]),
            "output_cols": self._value("output_cols"),
            "output_kinds": self._value("output_kinds"),
            "run_id": run_id,
            "_metadata": metadata,
        }

    def _left_text(self, store: Store, run_id: str) -> str:
        """What a failed run has left to go on from, in a line of its own; empty if nothing."""
        if self._value("store") is None:  # its folder goes with this fit
            return ""
        try:
            found = self._checkpoint(store, run_id)
        except (OSError, DataError):  # the workers' failure is the one to tell
            return ""
        if found is None:
            return ""
        return (
            f"\nRun {run_id!r} has a checkpoint of epoch {found.epochs} of {self._value('epochs')}: fit again with "
            f"run_id={run_id!r} to go on from there."
        )

    def _get_or_create_backend(self) -> Any:
        """The ``backend`` param, or a SparkBackend of ``num_proc`` workers. Subclasses may bring their own."""
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
        """The ``store`` param as a Store; where there is none, a temporary folder, which keeps runs if told so."""
        if self._value("store") is not None:
            yield Store.create(self._value("store"))
            return
        with tempfile.TemporaryDirectory(prefix="hvd_cluster-fit-") as folder:
            yield Store.create(Path(folder), save_runs=save_runs)


def _resumed_text(found: Checkpoint | Snapshot, spec: Any) -> str:
    run_id, finished, epochs = spec.run_id, found.epochs, spec.epochs
    if not found.is_over(spec):
        return f"run {run_id!r} goes on after epoch {finished} of {epochs}"
    if finished < epochs:
        return (
            f"run {run_id!r} was stopped after epoch {finished} of {epochs} and has nothing left to train: choose "
            "another run_id to train anew"
        )
    return (
        f"run {run_id!r} has finished {finished} of {epochs} epochs and has nothing left to train: raise epochs to go "
        "on, or choose another run_id to train anew"
    )


def _new_run_id(prefix: str) -> str:
    now = dt.datetime.now(dt.timezone.utc)
    return f"{prefix}_{now:%Y%m%d_%H%M%S}_{secrets.token_hex(3)}"
